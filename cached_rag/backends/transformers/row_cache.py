"""A transformers cache for a forward pass over any rows of a prompt, not only the last ones.

It may show an observer which keys the question attends to, layer by layer; the method turns these
weights into scores. Knows buffers and slots; knows no method.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from cached_rag.backends.transformers.attention.kernels import Scoring, capped, centre_of
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.drift import Drift
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import Layout, QuestionSelector


class Observed(Exception):  # noqa: N818 (a signal, not an error)
    """Ends a forward pass once every layer of interest has been observed."""


class Observer:
    """Collects a method's scores of a prompt's tokens.

    Attributes:
        layers: the layers it observes, ascending.
        scores: (seq_len,) float32 for each layer observed so far.
    """

    def __init__(self, selector: QuestionSelector, layout: Layout) -> None:
        self.scores: list[torch.Tensor] = []
        self.layers = selector.observed_layers(layout)
        self._selector = selector
        self._question = layout.question
        self._rows: tuple[Rows, Rows] | None = None  # of a pass, and the question's among them

    def __call__(
        self, layer: int, rows: Rows, query: torch.Tensor, keys: torch.Tensor, how: Scoring
    ) -> None:
        """Score the tokens by the question's attention in one layer, if that layer is observed."""
        if layer not in self.layers:
            return
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, rows.narrowed(rows.slots >= self._question)
        asking = self._rows[1]
        asked = query[0, :, -len(asking) :]
        weights = head_mean(asked, keys[0], asking, how)
        self.scores.append(self._selector.score(weights))


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
        hidden |= positions <= slots[:, None] - window
    mean = query.new_zeros(count, keys.shape[1], dtype=torch.float32)
    factor = how.factor(head_dim)
    # One KV head at a time: the scores of all heads at once would not fit the cache.
    for head_query, head_keys in zip(grouped, keys, strict=True):
        if how.softcap is None:
            head_keys = head_keys - centre_of(head_keys)
        scores = capped((head_query * factor) @ head_keys.T, how.softcap)
        scores = scores.view(-1, count, keys.shape[1])
        scores[:, :, first:].masked_fill_(hidden, float("-inf"))
        torch.softmax(scores, dim=-1, out=scores)  # in fp32 inside, whatever the dtype
        mean += scores.sum(dim=0, dtype=torch.float32)
    return mean / heads


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
        super().__init__(layers=[])
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
        return keys[:, :, : self.rows.length], values[:, :, : self.rows.length]

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, how: Scoring) -> None:
        """Show the observer a layer's query and keys before the layer attends.

        Raises:
            Observed: this was the last layer, so the pass can end.
        """
        if self.observer is None:
            return
        self.observer(layer, self.rows, query, keys, how)
        if layer == len(self.windows) - 1:
            raise Observed

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the model takes to come before those that enter it."""
        return self.rows.length - self._entering

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks cover all slots, from the first one on."""
        return self.rows.length, 0
