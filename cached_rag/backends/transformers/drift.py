"""Corrects a chunk's reused KV by what its recomputed tokens show.

The text before a chunk moves the keys and values of all its tokens, and a large part of that
movement is the same vector for the whole chunk (docs/experiments.md). So the mean movement of the
chunk's recomputed tokens is added to the others, which costs no further token. This is our own
addition, from no paper. Knows slots; knows no method and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.kv.buffer import KVBuffer

# A chunk's first tokens move like the others, but scatter more: the variance falls about as one
# over the square root of the distance from the chunk's beginning. So a sample has the weight
# sqrt(distance / _SETTLED), which is 1 at this distance.
_SETTLED = 64
# Few samples say little: with a total weight of n, other tokens move by n / (n + _CAUTION) of the
# mean.
_CAUTION = 4


@dataclass(frozen=True)
class _Samples:
    """Which recomputed rows are samples of which chunks.

    Attributes:
        rows: the rows of the pass that these samples were taken from.
        picked: (num_picked,) indices of the rows that lie in a chunk.
        weights: (num_modules, num_picked) fp32; multiplied by the picked rows' movements they give
            each chunk's movement.
        begin, end: slots from the first chunk that has a sample to the last one.
        chunk: (end - begin,) index of the chunk that each of them lies in; the number of chunks,
            where it lies in none.
    """

    rows: Rows
    picked: torch.Tensor
    weights: torch.Tensor
    begin: int = 0
    end: int = 0
    chunk: torch.Tensor | None = None


class Drift:
    """Moves a request's reused keys and values by the mean movement of each chunk's samples."""

    def __init__(self, modules: Sequence[tuple[int, int]]) -> None:
        self._modules = tuple(modules)
        self._last: _Samples | None = None

    def transfer(
        self, layer: int, rows: Rows, keys: torch.Tensor, values: torch.Tensor, buffer: KVBuffer
    ) -> None:
        """Move one layer's KV of the chunks that some of `rows` lie in.

        Args:
            keys, values: (batch, num_kv_heads, num_rows, dim), computed for `rows`.

        Effects: writes all slots of those chunks in `buffer`. That includes the slots of `rows`,
            which the caller overwrites with `keys` and `values` afterwards.
        """
        if layer == 0:  # its KV depends on the token alone, not on the text before it
            return
        samples = self._samples(rows)
        if samples.chunk is None:
            return
        slots = rows.slots[samples.picked]
        sides = ((keys, buffer.keys[layer]), (values, buffer.values[layer]))
        moves = [fresh[:, :, samples.picked].float() - held[:, :, slots] for fresh, held in sides]
        means = [(samples.weights @ moved).to(keys.dtype) for moved in moves]
        by_chunk = [F.pad(mean, (0, 0, 0, 1)) for mean in means]  # zeros for what is in no chunk
        shifts = [mean.index_select(2, samples.chunk) for mean in by_chunk]
        # From here on nothing can fail for want of memory, which would leave one side moved.
        for (_, held), shift in zip(sides, shifts, strict=True):
            held[:, :, samples.begin : samples.end] += shift

    def _samples(self, rows: Rows) -> _Samples:
        if self._last is None or self._last.rows is not rows:
            self._last = self._sampled(rows)
        return self._last

    def _sampled(self, rows: Rows) -> _Samples:
        spoken, counts, device = [], [], rows.slots.device
        slots = rows.slots.cpu()  # a GPU would be waited for at each question below
        for begin, end in self._modules:
            offsets = (slots - begin).clamp(min=0) * (slots < end)
            if offsets.any():
                spoken.append((begin, end))
                counts.append((offsets / _SETTLED).sqrt())
        if not spoken:
            nothing = torch.empty(0, dtype=torch.int64)
            return _Samples(rows, nothing, torch.empty(0, 0))
        counted = torch.stack(counts)
        picked = counted.any(dim=0).nonzero().squeeze(1)
        weights = counted[:, picked] / (counted.sum(dim=1, keepdim=True) + _CAUTION)
        first, last = spoken[0][0], spoken[-1][1]
        chunk = torch.full((last - first,), len(spoken))
        for index, (begin, end) in enumerate(spoken):
            chunk[begin - first : end - first] = index
        picked, weights, chunk = (part.to(device) for part in (picked, weights, chunk))
        return _Samples(rows, picked, weights, first, last, chunk)
