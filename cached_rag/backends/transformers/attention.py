"""Attention of rows that are scattered in a prompt, few, or share keys with other rows.

RelayAttention: rows of a batch share runs of keys, and each run is read once for all its rows.
Attention over several runs of keys is the average of the attention over each run, weighted by the
runs' sums of exponentials (RelayAttention, section 3.3; the sums are kept as logarithms, appendix
A). In the paper, one system prompt is shared by the whole batch. Here any rows of a batch may share
any run of keys, so that shared prefixes may form trees (appendix D).

Scattered rows of one prompt attend over all its keys: a row at slot p sees the keys at slots <= p
(within the layer's window), whichever rows are computed beside it. No mask of the whole prompt is
built: rows are computed in blocks, each over the keys up to the block's last row. Models reach them
through an attention of transformers, "cached_rag"; outside of `attending` it is transformers' own
sdpa. Knows tensors; knows no prompt, method or store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cached_rag.backends.transformers import kernels
from cached_rag.backends.transformers.kernels import KV, Attended, Scoring
from cached_rag.kv.layers import Ragged

IMPLEMENTATION = "cached_rag"
_BLOCK_ROWS = 128
# From this many rows on, attention without a mask is worth two passes and their merging.
_UNMASKED_ROWS = 64
# Masks of up to this many bytes are kept for the other layers; larger ones are built in each layer.
_MASK_BYTES_KEPT, _MASK_BYTES_KEPT_ON_GPU = 64 << 20, 512 << 20
# A GPU computes few large blocks faster than many small ones: scores of one.
_GPU_BLOCK_SCORES = 16 << 20


@dataclass(frozen=True)
class Part:
    """A run of keys, and the tokens of the batch that see it.

    Attributes:
        keys, values: of each layer (1, num_kv_heads, num_keys, dim).
        tokens: which of the batch's tokens see the keys.
    """

    keys: Sequence[torch.Tensor] | Ragged
    values: Sequence[torch.Tensor] | Ragged
    tokens: slice | torch.Tensor

    def of(self, layer: int) -> KV:
        """One layer's."""
        return KV(self.keys[layer], self.values[layer])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the run's tokens from the batch's (1, num_kv_heads, num_tokens, dim) KV."""
        self.keys[layer].copy_(keys[:, :, self.tokens])
        self.values[layer].copy_(values[:, :, self.tokens])


@dataclass(frozen=True)
class Padded:
    """Several rows with one token each, their own keys side by side in one padded tensor.

    Attributes:
        keys, values: of each layer (num_rows, num_kv_heads, num_keys, dim).
        mask: (num_rows, 1, 1, num_keys), see `attend_padded`.
        tokens: (n,) which of the batch's tokens these are.
        rows: (n,) for each of these tokens, the index of its row in `keys`.
        at: (n,) for each of them, the index of its own key in the row.
    """

    keys: Sequence[torch.Tensor] | Ragged
    values: Sequence[torch.Tensor] | Ragged
    mask: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    at: torch.Tensor

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `Part.write`."""
        self.keys[layer][self.rows, :, self.at] = keys[0, :, self.tokens].transpose(0, 1)
        self.values[layer][self.rows, :, self.at] = values[0, :, self.tokens].transpose(0, 1)


def relay_attention(
    query: torch.Tensor,
    shared: Sequence[Part],
    private: Sequence[Part | Padded],
    layer: int,
    how: Scoring,
) -> torch.Tensor:
    """Attention of a batch's tokens over the runs that rows share and over each row's own keys.

    Args:
        query: (num_tokens, num_heads, head_dim), the tokens of one row after those of another.
        shared: runs of keys; a token that sees a run sees all of it.
        private: every row's own keys, each row in one entry. In a `Part`, `tokens` is a slice, and
            the last keys are those of these tokens; each token sees its own key and all before it.
        how: a window is not looked at.

    Returns:
        (num_tokens, num_heads, value_dim).
    """
    count, heads, _ = query.shape
    width = private[0].values[layer].shape[-1]
    output = query.new_empty(count, heads, width, dtype=torch.float32)
    lse = query.new_empty(count, heads, dtype=torch.float32)
    for own in private:
        if isinstance(own, Padded):
            found = _padded(query, own, layer, how)
        else:
            found = _private(query, own, layer, how)
        output[own.tokens], lse[own.tokens] = found[0].float(), found[1]
    for part in shared:
        at = part.tokens
        found = _seen_by_all(query[at], part.of(layer), how)
        output[at], lse[at] = merge((output[at], lse[at]), found)
    return how.with_sinks(output, lse).to(query.dtype)


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over two runs of keys, from the attention over each (equations 7 and 11)."""
    lse = torch.logaddexp(first[1], second[1])
    parts = [found * (own - lse).exp()[..., None] for found, own in (first, second)]
    return parts[0] + parts[1], lse


def _padded(query: torch.Tensor, own: Padded, layer: int, how: Scoring) -> Attended:
    """As `_private`, for several rows with one token each."""
    kv = KV(own.keys[layer], own.values[layer])
    count, kv_heads = kv.keys.shape[:2]
    _, heads, dim = query.shape
    asked = query.new_zeros(count, heads, dim)
    asked[own.rows] = query[own.tokens]
    folded = asked.view(count, kv_heads, -1, dim)
    found, lse = kernels.attend_padded(folded, kv, own.mask, how)
    return found.reshape(count, heads, -1)[own.rows], lse.reshape(count, heads)[own.rows]


def _private(query: torch.Tensor, part: Part, layer: int, how: Scoring) -> Attended:
    """A row's tokens over its own keys: (tokens, num_heads, value_dim), (tokens, num_heads) lse."""
    asked, kv = query[part.tokens], part.of(layer)
    if len(asked) == 1:
        return _seen_by_all(asked, kv, how)
    before = kv.keys.shape[2] - len(asked)
    fresh = kv.at(slice(before, None))
    found, lse = kernels.attend_causal(asked.transpose(0, 1)[None], fresh, how)
    own = found[0].transpose(0, 1), lse[0].transpose(0, 1)
    if not before:
        return own
    return merge(own, _seen_by_all(asked, kv.at(slice(before)), how))


def _seen_by_all(query: torch.Tensor, kv: KV, how: Scoring) -> Attended:
    """As `_private`, for keys all of which every token sees."""
    count, heads, dim = query.shape
    kv_heads = kv.keys.shape[1]
    if count == 1:
        found, lse = kernels.attend(query.view(1, kv_heads, -1, dim), kv, how)
        return found.reshape(1, heads, -1), lse.reshape(1, heads)
    # Tokens and the heads of a group become rows of one product, so each key is read once.
    folded = query.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    found, lse = kernels.attend(folded, kv, how)
    found = found.view(kv_heads, count, -1, kv.values.shape[3]).transpose(0, 1)
    lse = lse.view(kv_heads, count, -1).transpose(0, 1)
    return found.reshape(count, heads, -1), lse.reshape(count, heads)


@dataclass
class _Block:
    """A block of query rows and the keys that some of them see.

    Attributes:
        masked: a mask is needed, as the rows do not all see the same keys.
        causal: rows and keys both begin at slot 0, so the kernel's own causal mask is right.
        mask: kept for the next layer; None if it is built in each.
    """

    rows: slice
    keys: slice
    masked: bool
    causal: bool = False
    mask: torch.Tensor | None = None


@dataclass
class Rows:
    """Which slots the rows of a forward pass belong to.

    Attributes:
        slots: (num_rows,) int64, strictly ascending.
        length: how many key slots there are; more than the last of `slots`.
    """

    slots: torch.Tensor
    length: int
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

    def attend(self, query: torch.Tensor, kv: KV, how: Scoring) -> torch.Tensor:
        """Attention of every row over the keys it may see.

        Args:
            query: (batch, num_heads, num_rows, head_dim).
            kv: of all slots.

        Returns:
            (batch, num_heads, num_rows, value_dim).
        """
        if self._needs_no_mask(query, kv, how):
            return self._attend_unmasked(query, kv, how)
        is_bounded = how.softcap is not None or how.sinks is not None
        in_blocks = is_bounded or kernels.prefers_matmul(query)  # then no kernel is used for causal
        if how.window not in self._plans:
            heads = query.shape[1] if is_bounded else 1  # whose scores lie in memory at a time
            self._plans[how.window] = self._plan(how.window, heads, in_blocks=in_blocks)
        blocks = self._plans[how.window]
        parts = [self._attend_block(block, query, kv, how) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _needs_no_mask(self, query: torch.Tensor, kv: KV, how: Scoring) -> bool:
        """Whether `_attend_unmasked` is possible and the faster way."""
        has_end = how.window is not None and how.window <= self.last
        is_plain = how.softcap is None and how.sinks is None and not has_end
        behind = self.first > 0 and self.is_contiguous
        if not (is_plain and behind and query.shape[0] == 1 and kv.is_even):
            return False
        if self._is_on_gpu:
            if query.dtype == torch.float32 or len(self) == 1:
                return False
            return kernels.kernel_of(len(self), kv) == "flash"
        is_flash = query.device.type == "cpu" and query.dtype == torch.bfloat16
        return is_flash and len(self) >= _UNMASKED_ROWS and kernels.flash_has_matrix_units()

    def _attend_unmasked(self, query: torch.Tensor, kv: KV, how: Scoring) -> torch.Tensor:
        """Neighbouring rows: the keys before the first row, which all see, then their own."""
        folded = query.reshape(1, kv.keys.shape[1], -1, query.shape[3])
        output, lse = kernels.attend(folded, kv.at(slice(self.first)), how)
        seen = output.reshape(query.shape), lse.reshape(query.shape[:3])
        among = kernels.attend_causal(query, kv.at(slice(self.first, self.last + 1)), how)
        return merge(seen, among)[0].to(query.dtype)

    def _plan(self, window: int | None, heads: int, *, in_blocks: bool) -> list[_Block]:
        """The blocks of a window.

        Args:
            heads: how many are computed at a time; a kernel that writes no scores counts as one.
            in_blocks: also rows from slot 0 on, of which a kernel could compute all.
        """
        unwindowed = window is None or window > self.last
        is_whole = self.first == 0 and self.is_contiguous and unwindowed
        if is_whole and not (in_blocks and len(self) > _BLOCK_ROWS):
            rows = slice(0, len(self))
            return [_Block(rows, rows, masked=False, causal=len(self) > 1)]
        blocks = []
        most = _BLOCK_ROWS
        if self._is_on_gpu:
            most = max(most, _GPU_BLOCK_SCORES // (self.length * heads))
        size = -(-len(self) // -(-len(self) // most))  # blocks of one size
        for begin in range(0, len(self), size):
            end = min(begin + size, len(self))
            low, high = int(self.slots[begin]), int(self.slots[end - 1])
            oldest = 0 if window is None else max(0, kernels.first_seen(window, low))
            keys = slice(oldest, high + 1)
            blocks.append(_Block(slice(begin, end), keys, masked=end - begin > 1))
        return blocks

    def _attend_block(
        self, block: _Block, query: torch.Tensor, kv: KV, how: Scoring
    ) -> torch.Tensor:
        query, kv, window = query[:, :, block.rows], kv.at(block.keys), how.window
        if how.softcap is not None or how.sinks is not None:
            is_masked = block.masked or block.causal
            mask = self._mask(block, window, query.dtype) if is_masked else None
            return kernels.plain_attention(query, kv, mask, how)
        mask = self._mask(block, window, query.dtype) if block.masked else None
        if kernels.prefers_matmul(query) and not block.causal:
            if mask is not None and window is None:  # all rows see the keys up to the first row's
                mask = mask[:, int(self.slots[block.rows.start]) + 1 :]
            return kernels.matmul_attention(query, kv, mask, how.scale)
        groups, device = query.shape[1] // kv.keys.shape[1], query.device.type
        # On other devices than a CPU only unmasked kernels take fewer KV heads than heads; with a
        # mask, torch would use a kernel that writes all scores to memory.
        grouped = groups > 1 and (device == "cpu" or (device == "cuda" and mask is None))
        if groups > 1 and not grouped:
            kv = kv.repeated(groups)
        return F.scaled_dot_product_attention(
            query, *kv, mask, is_causal=block.causal, scale=how.scale, enable_gqa=grouped
        )

    def _mask(self, block: _Block, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive (rows, keys) mask: 0 where a row sees a key, -inf elsewhere."""
        if block.mask is not None:
            return block.mask
        slots = self.slots[block.rows, None]
        keys = torch.arange(block.keys.start, block.keys.stop, device=slots.device)[None]
        hidden = keys > slots
        if window is not None:
            hidden |= keys < kernels.first_seen(window, slots)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device)
        mask.masked_fill_(hidden, float("-inf"))
        most = _MASK_BYTES_KEPT_ON_GPU if self._is_on_gpu else _MASK_BYTES_KEPT
        if mask.nbytes * len(self) <= most * len(slots):  # those of all blocks together
            block.mask = mask
        return mask


class Attending(Protocol):
    """What the attention function needs to know of the forward pass that is running."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window."""

    def attend(self, layer: int, query: torch.Tensor, kv: KV, how: Scoring) -> torch.Tensor:
        """A layer's attention, of the shapes that `Rows.attend` has."""


_ACTIVE: ContextVar[Attending | None] = ContextVar("cached_rag_attending", default=None)


@contextmanager
def attending(state: Attending) -> Iterator[None]:
    """Inside this context, models set to `IMPLEMENTATION` attend through `state`."""
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
    sinks: torch.Tensor | None = kwargs.get("s_aux")
    state = _ACTIVE.get()
    if state is None and (softcap is not None or sinks is not None):
        mask = _causal_mask(query, key) if attention_mask is None else attention_mask
        how = Scoring(scaling, softcap=softcap, sinks=sinks)
        output = kernels.plain_attention(query, KV(key, value), mask, how)
        return output.transpose(1, 2).contiguous(), None
    if state is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    layer: int = module.layer_idx  # type: ignore[assignment]
    how = Scoring(scaling, state.windows[layer], softcap, sinks)
    output = state.attend(layer, query, KV(key, value), how)
    return output.transpose(1, 2).contiguous(), None  # as transformers' own: some models view it


def _causal_mask(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """An additive causal mask, which transformers leaves out if its own kernel would apply one."""
    mask = query.new_full((query.shape[2], keys.shape[2]), float("-inf"))
    return mask.triu(keys.shape[2] - query.shape[2] + 1)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return sdpa_mask(*args, **kwargs) if _ACTIVE.get() is None else None


def register() -> None:
    """Register `IMPLEMENTATION` with transformers; a second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
