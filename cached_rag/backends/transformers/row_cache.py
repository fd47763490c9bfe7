"""A transformers cache whose rows need not be at the end.

Knows buffers and slots; knows no method.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.drift import Drift
from cached_rag.backends.transformers.observe import Observed, Observer
from cached_rag.kv.buffer import KVBuffer


class Peeked(Exception):  # noqa: N818 (a signal, not an error)
    """Ends a layer's forward pass once its keys and values are known."""


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache over a `KVBuffer` whose rows need not be at the end.

    Batch rows share the same slots. `length` slots exist; `rows` says which ones a forward pass
    computes.
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
        """Scatter (batch, num_kv_heads, num_rows, dim) into the buffer; return all slots."""
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

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Pass on what a layer's attention is about to do.

        Raises:
            Observed: this is the last layer, so there is nothing more to see.
        """
        if self.observer is None:
            return
        self.observer(layer, self.rows, query, keys, scale, window, softcap)
        if layer == len(self.windows) - 1:
            raise Observed

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the tokens that enter the model, were they the last ones."""
        return self.rows.length - self._entering

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """All slots, from the first."""
        return self.rows.length, 0
