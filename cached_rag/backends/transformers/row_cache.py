"""A transformers cache for a forward pass over any rows of a prompt, not only the last ones.

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

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Show the observer a layer's query and keys before the layer attends.

        Raises:
            Observed: this was the last layer, so the pass can end.
        """
        if self.observer is None:
            return
        self.observer(layer, self.rows, query, keys, scale, window, softcap)
        if layer == len(self.windows) - 1:
            raise Observed

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the model takes to come before those that enter it."""
        return self.rows.length - self._entering

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks cover all slots, from the first one on."""
        return self.rows.length, 0
