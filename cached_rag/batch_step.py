"""One decode step of several answers at once, each over its own KV or over what they share.

The linear layers read the weights once for all rows; attention goes row by row, so that rows need
neither the same length nor one common buffer. Knows nothing of sampling, and not whose rows they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from cached_rag.assemble import KVBuffer
from cached_rag.attention import Rows, attending
from cached_rag.decode import step
from cached_rag.model import LanguageModel
from cached_rag.relay import SharedKV, relay_attention


@dataclass(frozen=True)
class NextToken:
    """A token at `slot`, to be computed over the slots before it in `buffer`."""

    buffer: KVBuffer | SharedKV
    token: int
    slot: int


class _BatchCache(Cache):  # type: ignore[misc]
    """Writes each row's keys and values to its own buffer, and attends there.

    It is the cache and the rows of `attending` in one: attention follows update layer by layer.
    """

    def __init__(self, steps: Sequence[NextToken], windows: tuple[int | None, ...]) -> None:
        super().__init__(layers=[])
        self.windows = windows
        self._last = max(one.slot for one in steps)
        self._own: dict[int, tuple[KVBuffer, Rows]] = {}
        self._shared: dict[int, SharedKV] = {}
        for index, one in enumerate(steps):
            if isinstance(one.buffer, SharedKV):
                one.buffer.open_slot(one.slot)
                self._shared[index] = one.buffer
            else:
                slot = torch.tensor([one.slot], device=one.buffer.keys.device)
                self._own[index] = (one.buffer, Rows(slot, one.slot + 1))
        self._layer = 0

    @property
    def rows(self) -> _BatchCache:
        """What attends: this."""
        return self

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (batch, num_kv_heads, 1, dim), a row to each buffer."""
        self._layer = layer_idx
        for index, (buffer, rows) in self._own.items():
            one = slice(index, index + 1)
            buffer.write(layer_idx, rows.index, key_states[one], value_states[one])
        for index, shared in self._shared.items():
            one = slice(index, index + 1)
            shared.write(layer_idx, key_states[one], value_states[one])
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """(batch, num_heads, 1, value_dim) for a (batch, num_heads, 1, head_dim) query."""
        parts: dict[int, torch.Tensor] = {}
        for index, (buffer, rows) in self._own.items():
            seen = buffer.keys[self._layer][:, :, : rows.length]
            values = buffer.values[self._layer][:, :, : rows.length]
            parts[index] = rows.attend(query[index : index + 1], seen, values, scale, window)
        if self._shared:
            every = list(self._shared.values())
            asked = query[list(self._shared)]
            relayed = relay_attention(asked, every, self._layer, scale, window)
            parts |= zip(self._shared, relayed[:, None], strict=True)
        return torch.cat([parts[index] for index in range(len(query))])

    def observe(self, *_: Any) -> None:
        """Nobody watches decoding."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the longest row's token."""
        return self._last

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """All slots of the longest row, from the first."""
        return self.get_seq_length() + query_length, 0


def can_batch(model: LanguageModel) -> bool:
    """Whether rows of different lengths go through the model in one pass.

    Not where its attention is its own (biases by position), nor where its frequencies depend on
    the longest row.
    """
    return model.decoder.is_fast and model.rule.limit is None


@torch.inference_mode()
def step_batch(model: LanguageModel, steps: Sequence[NextToken]) -> torch.Tensor:
    """(batch, vocab_size) logits after one more token each; their KV is written.

    Models that cannot batch take one row after the other.
    """
    own = [(one.buffer, one) for one in steps if isinstance(one.buffer, KVBuffer)]
    if len(own) == len(steps) and (len(steps) == 1 or not can_batch(model)):
        return torch.cat([step(model, buffer, one.token, one.slot) for buffer, one in own])
    decoder, device = model.decoder, model.device
    cache = _BatchCache(steps, decoder.windows)
    inputs = {
        "input_ids": torch.tensor([[one.token] for one in steps], device=device),
        "position_ids": torch.tensor(
            [[one.buffer.position(one.slot)] for one in steps], device=device
        ),
        "past_key_values": cache,
        "use_cache": True,
    }
    known = decoder.parameters
    with attending(cache):
        output = decoder.model(**{k: v for k, v in inputs.items() if k in known})
    logits: torch.Tensor = output.logits[:, -1]
    return logits
