"""A transformers cache for a forward pass over any rows of a prompt, not only the last ones.

It may show an observer which keys the question attends to, layer by layer; the method turns these
weights into scores. And it may correct a chunk's reused KV by what its recomputed tokens show: the
text before a chunk moves the keys and values of all its tokens, and a large part of that movement
is the same vector for the whole chunk (docs/experiments.md). So the mean movement of the chunk's
recomputed tokens is added to the others, which costs no further token. This is our own addition,
from no paper. Knows buffers and slots; knows no method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from transformers import Cache

from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.kernels import (
    KV,
    Scoring,
    capped,
    centre_of,
    first_seen,
    softmax,
)
from cached_rag.backends.transformers.states import windows_before
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import Layout, QuestionSelector

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
        picked: (num_picked,) indices of the rows that lie in a chunk.
        weights: (num_modules, num_picked) fp32; multiplied by the picked rows' movements they give
            each chunk's movement.
        begin, end: slots from the first chunk that has a sample to the last one.
        chunk: (end - begin,) index of the chunk that each of them lies in; the number of chunks,
            where it lies in none.
    """

    picked: torch.Tensor
    weights: torch.Tensor
    begin: int
    end: int
    chunk: torch.Tensor


class Drift:
    """Moves a request's reused keys and values by the mean movement of each chunk's samples."""

    def __init__(self, modules: Sequence[tuple[int, int]]) -> None:
        self._modules = tuple(modules)
        self._rows: Rows | None = None
        self._last: _Samples | None = None  # of these rows

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
        if rows is not self._rows:
            self._rows, self._last = rows, self._sampled(rows)
        if (samples := self._last) is None:
            return
        slots = rows.slots[samples.picked]
        sides = [(keys, buffer.keys[layer]), (values, buffer.values[layer])]
        sides = [(fresh, held) for fresh, held in sides if fresh.shape[-1]]
        moves = [fresh[:, :, samples.picked].float() - held[:, :, slots] for fresh, held in sides]
        means = [(samples.weights @ moved).to(keys.dtype) for moved in moves]
        by_chunk = [F.pad(mean, (0, 0, 0, 1)) for mean in means]  # zeros for what is in no chunk
        shifts = [mean.index_select(2, samples.chunk) for mean in by_chunk]
        # From here on nothing can fail for want of memory, which would leave one side moved.
        for (_, held), shift in zip(sides, shifts, strict=True):
            held[:, :, samples.begin : samples.end] += shift

    def _sampled(self, rows: Rows) -> _Samples | None:
        """The samples among some rows; None if they lie in no chunk."""
        spoken, counts, device = [], [], rows.slots.device
        slots = rows.slots.cpu()  # a GPU would be waited for at each question below
        for begin, end in self._modules:
            offsets = (slots - begin).clamp(min=0) * (slots < end)
            if offsets.any():
                spoken.append((begin, end))
                counts.append((offsets.float() / _SETTLED).sqrt())
        if not spoken:
            return None
        counted = torch.stack(counts)
        picked = counted.any(dim=0).nonzero().squeeze(1)
        weights = counted[:, picked] / (counted.sum(dim=1, keepdim=True) + _CAUTION)
        first, last = spoken[0][0], spoken[-1][1]
        chunk = torch.full((last - first,), len(spoken))
        for index, (begin, end) in enumerate(spoken):
            chunk[begin - first : end - first] = index
        picked, weights, chunk = (part.to(device) for part in (picked, weights, chunk))
        return _Samples(picked, weights, first, last, chunk)


class Observed(Exception):  # noqa: N818 (a signal, not an error)
    """Ends a forward pass once every layer of interest has been observed."""


class Observer:
    """Collects a method's scores of a prompt's tokens.

    Attributes:
        layers: the layers it observes, ascending.
        scores: (seq_len,) float32 for each layer observed so far.
    """

    def __init__(
        self, selector: QuestionSelector, layout: Layout, attending: Sequence[int]
    ) -> None:
        """Observe a pass.

        Args:
            attending: the layers that have attention. Of those that the method names, the others
                are left out; if none is left, it is the next one that has.
        """
        self.scores: list[torch.Tensor] = []
        wanted = selector.observed_layers(layout)
        self.layers = tuple(layer for layer in wanted if layer in attending)
        if wanted and not self.layers:
            self.layers = (next((n for n in attending if n > wanted[0]), attending[-1]),)
        self._selector = selector
        self._question = layout.question
        self._rows: tuple[Rows, Rows] | None = None  # of a pass, and the question's among them

    def __call__(
        self, layer: int, rows: Rows, query: torch.Tensor, keys: torch.Tensor, how: Scoring
    ) -> None:
        """Score the tokens by the question's attention in one layer, if that layer is observed.

        Raises:
            Observed: this was the last of the layers.
        """
        if layer not in self.layers:
            return
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, rows.narrowed(rows.slots >= self._question)
        asking = self._rows[1]
        asked = query[0, :, -len(asking) :]
        weights = head_mean(asked, keys[0], asking, how)
        self.scores.append(self._selector.score(weights))
        if layer == self.layers[-1]:
            raise Observed


def head_mean(query: torch.Tensor, keys: torch.Tensor, rows: Rows, how: Scoring) -> torch.Tensor:
    """Attention weights of some rows over all keys, averaged over the heads.

    Args:
        query: (num_heads, num_rows, head_dim) of `rows`.
        keys: (num_kv_heads, length, head_dim).

    Returns:
        (num_rows, length) float32; each row sums to 1 over the keys it sees.
    """
    heads, count, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, head_dim)
    # Without a window, every row sees all keys up to the first row's; only later ones need a mask.
    slots, window = rows.slots, how.window
    first = rows.first + 1 if window is None else 0
    positions = torch.arange(first, keys.shape[1], device=slots.device)
    hidden = positions > slots[:, None]
    if window is not None:
        hidden |= positions < first_seen(window, slots[:, None])
    mean = query.new_zeros(count, keys.shape[1], dtype=torch.float32)
    factor = how.factor(head_dim)
    # One KV head at a time: the scores of all heads at once would not fit the cache.
    groups = [None] * len(keys) if how.sinks is None else how.sinks.view(len(keys), -1)
    for head_query, head_keys, sinks in zip(grouped, keys, groups, strict=True):
        if how.softcap is None and how.sinks is None:
            head_keys = head_keys - centre_of(head_keys)
        scores = capped((head_query * factor) @ head_keys.T, how.softcap)
        scores = scores.view(-1, count, keys.shape[1])
        scores[:, :, first:].masked_fill_(hidden, float("-inf"))
        mean += softmax(scores, sinks).sum(dim=0, dtype=torch.float32)
    return mean / heads


def numbered_from(slots: torch.Tensor) -> torch.Tensor:
    """(num_rows,) what to add to a row's index to get its slot."""
    return slots - torch.arange(len(slots), device=slots.device)


class Peeked(Exception):  # noqa: N818 (a signal, not an error)
    """Ends a layer's forward pass once its keys and values are computed."""


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache over a `KVBuffer` that holds a whole prompt.

    Attributes:
        rows: the slots that the pass computes, the same for all prompts of a batch.
        is_peeking: end the layer once keys and values are written, and keep them in `peeked`.
        peeked: fresh keys and values of the rows, then those that the buffer held before.
        observer: is shown every layer's query and keys; None for nobody.
        drift: corrects reused KV by the rows computed; None for no correction.
    """

    def __init__(
        self, buffer: KVBuffer, rows: Rows, entering: int, windows: tuple[int | None, ...]
    ) -> None:
        super().__init__(layers=getattr(buffer.states, "layers", []))
        self.buffer = buffer
        self.rows = rows
        self.windows = windows
        self.is_peeking = False
        self.peeked: tuple[torch.Tensor, ...] = ()
        self.observer: Observer | None = None
        self.drift: Drift | None = None
        self._entering = entering

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (batch, num_kv_heads, num_rows, dim) to the rows' slots; returns all slots' KV."""
        index = self.rows.index
        keys, values = self.buffer.keys[layer_idx], self.buffer.values[layer_idx]
        if self.is_peeking:
            old = (keys[0, :, index].clone(), values[0, :, index].clone())
            self.peeked = (key_states[0], value_states[0], *old)
        if self.drift is not None:
            self.drift.transfer(layer_idx, self.rows, key_states, value_states, self.buffer)
        self.buffer.write(layer_idx, index, key_states, value_states)
        if self.is_peeking:
            raise Peeked
        return self.seen(layer_idx)

    def seen(self, layer: int) -> KV:
        """Keys and values of one layer in all slots."""
        return KV(self.buffer.keys[layer], self.buffer.values[layer]).at(slice(self.rows.length))

    def preceding(self, layer: int, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """Keep inputs of a layer's convolutions, give each row's with those of tokens before it.

        Args:
            inputs: (batch, num_rows, width).
            count: how many tokens before a row.

        Returns:
            (batch, num_rows, count + 1, width); 0 where there is no token.
        """
        values = inputs[:, None]
        self.update(values[..., :0], values, layer)
        return windows_before(self.buffer.values[layer], self.rows.slots, count)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """A layer's state by MiniMax's name for it, (batch, num_heads, head_dim, head_dim).

        None before the first token.
        """
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """Keep a layer's state, shaped as `get_linear_cache` has it."""
        self.update_recurrent_state(state, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True

    def attend(self, layer: int, query: torch.Tensor, kv: KV, how: Scoring) -> torch.Tensor:
        """The rows' attention, see `Rows.attend`; the observer is shown query and keys before.

        Raises:
            Observed: this was the last layer that it observes, so the pass can end.
        """
        if self.observer is not None:
            self.observer(layer, self.rows, query, kv.keys, how)
        return self.rows.attend(query, kv, how)

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """How many tokens the model takes to come before those that enter it.

        For a layer that asks for itself, how many come before each row, less the rows before it.
        Llama 4's number rows by that, and scale their queries by the number.
        """
        if layer_idx is None:
            return self.rows.length - self._entering
        return numbered_from(self.rows.slots)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The same for masks."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks cover all slots, from the first one on."""
        return self.rows.length, 0
