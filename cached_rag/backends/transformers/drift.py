"""What the recomputed tokens of a module tell about its other tokens.

Text before a module moves the keys and values of all its tokens, and much of that movement is one
and the same vector for a whole module (docs/quality.md). So the mean movement of the tokens that
are computed anyway is passed on to those that are not: no token is computed for it. Ours; knows
slots, no method and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.kv.buffer import KVBuffer

# A module's first tokens move as the others do, but scatter more: the square of what is not common
# falls about as one over the square root of the distance from the module's beginning. A sample
# counts in proportion to that, a token at this distance as one.
_SETTLED = 64
# Few samples say little: n of them move the others by n / (n + this) of their mean.
_CAUTION = 4


@dataclass(frozen=True)
class _Samples:
    """Which rows speak for which modules.

    Attributes:
        rows: those of the pass that this was found out for.
        picked: indices of rows that do.
        weights: (modules, picked) fp32; times their movements it is what each module is moved by.
        modules: (begin, end) of each.
    """

    rows: Rows
    picked: torch.Tensor
    weights: torch.Tensor
    modules: tuple[tuple[int, int], ...]


class Drift:
    """Moves the reused keys and values of a request as their modules are seen to move."""

    def __init__(self, modules: Sequence[tuple[int, int]]) -> None:
        self._modules = tuple(modules)
        self._last: _Samples | None = None

    def transfer(
        self,
        layer: int,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
        buffer: KVBuffer,
    ) -> None:
        """Move what `buffer` holds of the modules that `rows` are of.

        Args:
            keys, values: (batch, num_kv_heads, num_rows, dim), computed for `rows`.

        Effects: writes all slots of those modules, `rows` included; theirs are to be overwritten.
        """
        if layer == 0:  # it sees words and nothing before them
            return
        samples = self._samples(rows)
        if not samples.modules:
            return
        slots = rows.slots[samples.picked]
        for fresh, held in ((keys, buffer.keys[layer]), (values, buffer.values[layer])):
            moved = fresh[:, :, samples.picked].float() - held[:, :, slots].float()
            means = (samples.weights @ moved).to(held.dtype)
            for module, (begin, end) in enumerate(samples.modules):
                held[:, :, begin:end] += means[:, :, module : module + 1]

    def _samples(self, rows: Rows) -> _Samples:
        if self._last is None or self._last.rows is not rows:
            self._last = self._sampled(rows)
        return self._last

    def _sampled(self, rows: Rows) -> _Samples:
        spoken, counts = [], []
        for begin, end in self._modules:
            offsets = (rows.slots - begin).clamp(min=0) * (rows.slots < end)
            if offsets.any():
                spoken.append((begin, end))
                counts.append((offsets / _SETTLED).sqrt())
        if not spoken:
            nothing = torch.empty(0, dtype=torch.int64)
            return _Samples(rows, nothing, torch.empty(0, 0), ())
        counted = torch.stack(counts)
        picked = counted.any(dim=0).nonzero().squeeze(1)
        weights = counted[:, picked] / (counted.sum(dim=1, keepdim=True) + _CAUTION)
        return _Samples(rows, picked, weights, tuple(spoken))
