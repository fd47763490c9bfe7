"""Attention of scattered rows of a prompt over all its keys: transformers' "cached_rag" attention.

The rows of a pass need not be neighbours: a row at slot p sees the keys at slots <= p (within the
layer's window), whichever rows are computed beside it. No mask of the whole prompt is built: rows
are computed in blocks, each over the keys up to the block's last row. Outside of `attending`, a
model set to this attention uses transformers' own sdpa. Knows no method and no store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cached_rag.backends.transformers.attention.kernels import (
    Scoring,
    attend,
    attend_causal,
    capped_attention,
    flash_has_matrix_units,
    kernel_of,
    matmul_attention,
    prefers_matmul,
)
from cached_rag.backends.transformers.attention.relay import merge

IMPLEMENTATION = "cached_rag"
_BLOCK_ROWS = 128
# From this many rows on, attention without a mask is worth two passes and their merging.
_UNMASKED_ROWS = 64
# Masks of up to this many bytes are kept for the other layers; larger ones are built in each layer.
_MASK_BYTES_KEPT, _MASK_BYTES_KEPT_ON_GPU = 64 << 20, 512 << 20
# A GPU computes few large blocks faster than many small ones: (row, key) pairs of one.
_GPU_BLOCK_SCORES = 16 << 20


@dataclass(frozen=True)
class _Block:
    """A block of query rows and the keys that some of them see.

    Attributes:
        masked: a mask is needed, as the rows do not all see the same keys.
        causal: rows and keys both begin at slot 0, so the kernel's own causal mask is right.
    """

    rows: slice
    keys: slice
    masked: bool
    causal: bool = False


@dataclass
class Rows:
    """Which slots the rows of a forward pass belong to.

    Attributes:
        slots: (num_rows,) int64, strictly ascending.
        length: how many key slots there are; more than the last of `slots`.
    """

    slots: torch.Tensor
    length: int
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict, repr=False)
    _plans: dict[int | None, list[_Block]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.first, self.last = self.slots[[0, -1]].tolist()  # one wait for a GPU, not two
        self.is_contiguous = self.last - self.first + 1 == len(self)

    def narrowed(self, keep: torch.Tensor) -> Rows:
        """The rows at these indices, or where a bool mask is true."""
        return Rows(self.slots[keep], self.length)

    def __len__(self) -> int:
        return self.slots.shape[0]

    @property
    def _is_on_gpu(self) -> bool:
        return self.slots.device.type == "cuda"

    @property
    def index(self) -> slice | torch.Tensor:
        """An index of the rows' slots: a slice if they are contiguous, which copies nothing."""
        return slice(self.first, self.last + 1) if self.is_contiguous else self.slots

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scoring
    ) -> torch.Tensor:
        """Attention of every row over the keys it may see.

        Args:
            query: (batch, num_heads, num_rows, head_dim).
            keys, values: (batch, num_kv_heads, length, dim).

        Returns:
            (batch, num_heads, num_rows, value_dim).
        """
        if self._needs_no_mask(query, keys, values, how):
            return self._attend_unmasked(query, keys, values, how)
        parts = [self._attend_block(b, query, keys, values, how) for b in self._blocks(how.window)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _needs_no_mask(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scoring
    ) -> bool:
        """Whether `_attend_unmasked` is possible and the faster way."""
        is_plain = how.softcap is None and (how.window is None or how.window > self.last)
        is_even = query.shape[0] == 1 and query.shape[3] == values.shape[3]
        behind = self.first > 0 and self.is_contiguous
        if not (is_plain and is_even and behind):
            return False
        if self._is_on_gpu:
            is_small = query.dtype != torch.float32
            return is_small and len(self) > 1 and kernel_of(len(self), keys, values) == "flash"
        is_flash = query.device.type == "cpu" and query.dtype == torch.bfloat16
        return is_flash and len(self) >= _UNMASKED_ROWS and flash_has_matrix_units()

    def _attend_unmasked(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scoring
    ) -> torch.Tensor:
        """Neighbouring rows: the keys before the first row, which all see, then their own."""
        factor = how.factor(query.shape[3])
        before, own = slice(self.first), slice(self.first, self.last + 1)
        folded = query.reshape(1, keys.shape[1], -1, query.shape[3])
        output, lse = attend(folded, keys[:, :, before], values[:, :, before], factor)
        seen = output.reshape(query.shape), lse.reshape(query.shape[:3])
        among = attend_causal(query, keys[:, :, own], values[:, :, own], factor)
        return merge(seen, among)[0].to(query.dtype)

    def _blocks(self, window: int | None) -> list[_Block]:
        if window not in self._plans:
            self._plans[window] = self._plan(window)
        return self._plans[window]

    def _plan(self, window: int | None) -> list[_Block]:
        unwindowed = window is None or window > self.last
        if self.first == 0 and self.is_contiguous and unwindowed:
            rows = slice(0, len(self))
            return [_Block(rows, rows, masked=False, causal=len(self) > 1)]
        blocks = []
        most = _BLOCK_ROWS
        if self._is_on_gpu:
            most = max(most, _GPU_BLOCK_SCORES // self.length)
        size = -(-len(self) // -(-len(self) // most))  # blocks of one size
        for begin in range(0, len(self), size):
            end = min(begin + size, len(self))
            low, high = int(self.slots[begin]), int(self.slots[end - 1])
            oldest = 0 if window is None else max(0, low - window + 1)
            keys = slice(oldest, high + 1)
            blocks.append(_Block(slice(begin, end), keys, masked=end - begin > 1))
        return blocks

    def _attend_block(
        self,
        block: _Block,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        how: Scoring,
    ) -> torch.Tensor:
        query = query[:, :, block.rows]
        keys, values = keys[:, :, block.keys], values[:, :, block.keys]
        window = how.window
        if how.softcap is not None:
            is_masked = block.masked or block.causal
            mask = self._mask(block, window, query.dtype) if is_masked else None
            return capped_attention(query, keys, values, mask, how.scale, how.softcap)
        mask = self._mask(block, window, query.dtype) if block.masked else None
        if prefers_matmul(query) and not block.causal:
            if mask is not None and window is None:  # all rows see the keys up to the first row's
                mask = mask[:, int(self.slots[block.rows.start]) + 1 :]
            return matmul_attention(query, keys, values, mask, how.scale)
        groups = query.shape[1] // keys.shape[1]
        grouped = groups > 1 and query.device.type == "cpu"
        if groups > 1 and not grouped:
            # On other devices only unmasked kernels take fewer KV heads than heads; with a mask,
            # torch would use a kernel that writes all scores to memory.
            grouped = mask is None and query.device.type == "cuda"
        if groups > 1 and not grouped:
            keys, values = repeat_kv(keys, groups), repeat_kv(values, groups)
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=block.causal,
            scale=how.scale,
            enable_gqa=grouped,
        )

    def _mask(self, block: _Block, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive (rows, keys) mask: 0 where a row sees a key, -inf elsewhere."""
        name = (window, block.rows.start)
        kept = self._masks.get(name)
        if kept is not None:
            return kept
        slots = self.slots[block.rows, None]
        keys = torch.arange(block.keys.start, block.keys.stop, device=slots.device)[None]
        hidden = keys > slots
        if window is not None:
            hidden |= keys <= slots - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device)
        mask.masked_fill_(hidden, float("-inf"))
        most = _MASK_BYTES_KEPT_ON_GPU if self._is_on_gpu else _MASK_BYTES_KEPT
        if mask.nbytes * len(self._blocks(window)) <= most:
            self._masks[name] = mask
        return mask


class Attending(Protocol):
    """What the attention function needs to know of the forward pass that is running."""

    @property
    def rows(self) -> Rows:
        """The rows that the current layer computes."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window."""

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, how: Scoring) -> None:
        """Called with each layer's query and keys before the layer attends."""


_ACTIVE: ContextVar[Attending | None] = ContextVar("cached_rag_attending", default=None)


@contextmanager
def attending(state: Attending) -> Iterator[None]:
    """Inside this context, models set to `IMPLEMENTATION` attend through `state.rows`."""
    token = _ACTIVE.set(state)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, whose arguments and result it has."""
    state = _ACTIVE.get()
    if state is None and softcap is not None:
        mask = _causal_mask(query, key) if attention_mask is None else attention_mask
        output = capped_attention(query, key, value, mask, scaling, softcap)
        return output.transpose(1, 2).contiguous(), None
    if state is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    layer: int = module.layer_idx  # type: ignore[assignment]
    how = Scoring(scaling, state.windows[layer], softcap)
    state.observe(layer, query, key, how)
    output = state.rows.attend(query, key, value, how)
    return output.transpose(1, 2).contiguous(), None  # as transformers' own: some models view it


def _causal_mask(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """An additive causal mask, which transformers leaves out if its own kernel would apply one."""
    if query.shape[2] == 1:
        return None
    mask = query.new_full((query.shape[2], keys.shape[2]), float("-inf"))
    return mask.triu(keys.shape[2] - query.shape[2] + 1)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return sdpa_mask(*args, **kwargs) if _ACTIVE.get() is None else None


def register() -> None:
    """Register `IMPLEMENTATION` with transformers; a second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
