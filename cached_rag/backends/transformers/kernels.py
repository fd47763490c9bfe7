"""Attention that also returns each row's log-sum-exp, by the fastest kernel of the device.

The log-sum-exp (lse) of a row is the logarithm of its softmax's denominator. With it, the results
over parts of the keys can be merged into the result over all keys (RelayAttention, equation 12).
Knows tensors only; `reference` is the definition.

In bf16 the CPU's flash kernel of torch 2.13 reaches a third of the speed of the matrix products it
consists of. For few rows all scores fit the cache, so two plain products are faster: they are
computed in bf16, the softmax between them in fp32. The memory for scores is kept between calls,
since page faults of fresh memory would cost more than the arithmetic.

Those scores are rounded to bf16 before the softmax, so they must be small. Those of real keys are
not: where the key projection has a bias (Qwen 2), all keys lie around a far point, and in scores of
several hundred, rounding erases the differences between keys. A vector that all keys have in common
shifts all scores of a row equally, which the softmax ignores. So it is subtracted first (as in
SageAttention, arXiv:2410.02367).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

# Rows computed at a time: their scores over some thousand keys fit the cache.
_LSE_ROWS = 384
# A smaller softmax weight has lost digits.
_VANISHING = 1e-30
# The keys' common part is estimated by the mean of every eighth key; it need not be exact.
_CENTRE_STEP = 8
_log = logging.getLogger(__name__)
_OPS = torch.ops.aten
# In bf16 on a CPU without matrix units, products are faster than torch's flash kernel once the keys
# no longer fit the cache. Pairs (rows, keys), ascending: with at least this many rows, flash is
# used up to this many keys. Each head of a group counts as a row.
# `python -m docs.experiments kernels` times both.
FLASH_KEYS = ((1, 16384), (48, 8192), (96, 3072), (192, 2048), (384, 1024))
_SMALL = (torch.bfloat16, torch.float16)

Attended = tuple[torch.Tensor, torch.Tensor]


class KV(NamedTuple):
    """Keys (batch, num_kv_heads, num_keys, key_dim) and values (..., value_dim) of one layer."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def is_even(self) -> bool:
        """Whether both are of one width."""
        return self.keys.shape[3] == self.values.shape[3]

    def at(self, slots: slice) -> KV:
        """Some of the tokens, as views."""
        return KV(self.keys[:, :, slots], self.values[:, :, slots])

    def repeated(self, groups: int) -> KV:
        """Each head so many times, for as many query heads."""
        return KV(self.keys.repeat_interleave(groups, 1), self.values.repeat_interleave(groups, 1))


class Chunks(int):
    """A window that begins anew at every multiple of its size (Llama 4's chunked attention)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunks) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash((Chunks, int(self)))


Slots = TypeVar("Slots", int, torch.Tensor)


def first_seen(window: int, slots: Slots) -> Slots:
    """The first slot that a row at each of these slots sees; less than 0 for the first of all."""
    if isinstance(window, Chunks):
        return slots // int(window) * int(window)
    return slots - window + 1


class Scoring(NamedTuple):
    """How a layer scores the keys that a row sees.

    Attributes:
        scale: factor of the scores; None for 1 / sqrt(head_dim).
        window: most keys that a row sees, its own included, or `Chunks`; None for no limit.
        softcap: bound of the scores (Gemma 2), see `capped`; None for no bound.
        sinks: (num_heads,) one more term of each head's softmax (gpt-oss), a score that no key has;
            None for none.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """What the scores are multiplied by."""
        return float(head_dim**-0.5) if self.scale is None else self.scale

    def with_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """(..., num_heads, value_dim) output, whose softmax had no sinks, as if it had them."""
        if self.sinks is None:
            return output
        return output * (lse - self.sinks.float()).sigmoid()[..., None].to(output.dtype)


class _Scratch(threading.local):
    """Memory for scores: one block for each dtype and thread, which grows and never shrinks."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, valid until the next call for that dtype."""
        count = math.prod(shape)
        block = self._blocks.get(dtype)
        if block is None or block.numel() < count:
            with torch.inference_mode(False):  # or only inference mode could write to it
                block = self._blocks[dtype] = torch.empty(count, dtype=dtype)
        return block[:count].view(shape)


_scratch = _Scratch()


def prefers_matmul(query: torch.Tensor) -> bool:
    """Whether `matmul_attention` is the faster form for a (batch, heads, rows, dim) query."""
    is_bf16 = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_bf16 and not flash_has_matrix_units()


@functools.cache
def flash_has_matrix_units() -> bool:
    """Whether this CPU has matrix units (AMX), with which torch's flash kernel is the faster one.

    `python -m docs.experiments kernels` times both: with AMX, flash takes .1 to .6 of the
    products' time.
    """
    return torch.cpu._is_amx_tile_supported()


def centre_of(keys: torch.Tensor) -> torch.Tensor:
    """A (head_dim,) vector that (num_keys, head_dim) keys have in common, in their dtype.

    Subtracting any vector from all keys leaves the attention unchanged; the nearer it is to the
    keys, the smaller the remaining scores.
    """
    return keys[::_CENTRE_STEP].mean(dim=0, dtype=torch.float32).to(keys.dtype)


def matmul_attention(
    query: torch.Tensor, kv: KV, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """softmax(scale * query keys^T + mask) values, for any number of heads per KV head.

    Args:
        query: (batch, num_heads, num_rows, head_dim).
        mask: (num_rows, num_masked), additive, for the last `num_masked` keys; None for none.
        scale: None for 1 / sqrt(head_dim).

    Returns:
        (batch, num_heads, num_rows, value_dim).
    """
    keys, values = kv
    batch, heads, rows, head_dim = query.shape
    kv_heads, count = keys.shape[1], keys.shape[2]
    scaled = query * (head_dim**-0.5 if scale is None else scale)
    folded = scaled.reshape(batch, kv_heads, -1, head_dim)
    scores = _scratch.take((folded.shape[2], count), query.dtype)
    by_head = scores.view(heads // kv_heads, rows, count)
    output = query.new_empty(batch, kv_heads, folded.shape[2], values.shape[3])
    # One head at a time: its scores stay in cache, and a strided batch would be copied.
    for row, head in itertools.product(range(batch), range(kv_heads)):
        centred = keys[row, head] - centre_of(keys[row, head])
        torch.mm(folded[row, head], centred.T, out=scores)
        if mask is not None:
            by_head[:, :, count - mask.shape[1] :] += mask
        torch.softmax(scores, dim=-1, out=scores)  # in fp32 inside, whatever the dtype
        torch.mm(scores, values[row, head], out=output[row, head])
    return output.view(batch, heads, rows, -1)


def plain_attention(
    query: torch.Tensor, kv: KV, mask: torch.Tensor | None, how: Scoring
) -> torch.Tensor:
    """As `matmul_attention`, with bounds of scores and sinks, in fp32, on any device.

    No kernel of torch has these. The keys' common part changes bounded scores, so it is not
    subtracted here.

    Args:
        mask: additive or bool, broadcast to (batch, num_heads, num_rows, num_keys).
    """
    keys, values = kv.repeated(query.shape[1] // kv.keys.shape[1])
    factor = how.factor(query.shape[-1])
    scores = capped((query.float() @ keys.float().transpose(2, 3)) * factor, how.softcap)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return softmax(scores, how.sinks).to(values.dtype) @ values


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of (..., num_heads, num_rows, num_keys) scores, with a sink a head, if there are.

    It is computed in fp32 inside, whatever the dtype.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores squeezed into (-softcap, softcap) by a tanh (Gemma 2); unchanged if it is None."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def matmul_attention_lse(query: torch.Tensor, kv: KV, scale: float) -> Attended:
    """As `matmul_attention` for rows that see all keys; also returns the rows' log-sum-exp.

    A weight is exp(score - lse), so the lse follows from one score and its weight. It is as exact
    as a weight in this dtype.

    Args:
        query: (1, num_kv_heads, num_rows, head_dim); the query heads that share a KV head are rows.

    Returns:
        (1, num_kv_heads, num_rows, value_dim) output, and (1, num_kv_heads, num_rows) lse in fp32.
    """
    scaled, (keys, values) = query[0] * scale, kv
    kv_heads, rows = scaled.shape[:2]
    output = query.new_empty(1, kv_heads, rows, values.shape[3])
    lse = query.new_empty(1, kv_heads, rows, dtype=torch.float32)
    for head in range(kv_heads):
        centre = centre_of(keys[0, head])
        centred = (keys[0, head] - centre).T
        for begin in range(0, rows, _LSE_ROWS):
            block = slice(begin, min(begin + _LSE_ROWS, rows))
            scores = _scratch.take((block.stop - begin, keys.shape[2]), query.dtype)
            lse[0, head, block] = _weigh(scaled[head, block], centred, scores)
            torch.mm(scores, values[0, head], out=output[0, head, block])
        lse[0, head] += scaled[head].float() @ centre.float()
    return output, lse


def _weigh(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Write softmax weights to (rows, keys) `weights`; returns the rows' log-sum-exp in fp32."""
    torch.mm(query, keys, out=weights)
    first = weights[:, 0].float()
    torch.softmax(weights, dim=-1, out=weights)
    weight = weights[:, 0].float()
    if float(weight.min()) > _VANISHING:
        return first - weight.log()
    # The first key's weight is too small. The largest is never, but finding it takes two passes.
    torch.mm(query, keys, out=weights)
    largest = weights.amax(-1).float()
    torch.softmax(weights, dim=-1, out=weights)
    return largest - weights.amax(-1).float().log()


def attend(query: torch.Tensor, kv: KV, how: Scoring) -> Attended:
    """Attention in which every row sees every key.

    Args:
        query: (1, num_kv_heads, num_rows, head_dim); the query heads that share a KV head are rows.
        kv: of a batch of 1; at least one key.
        how: window and sinks are not looked at; with a bound of the scores, plain torch computes.

    Returns:
        (1, num_kv_heads, num_rows, value_dim) output, and (1, num_kv_heads, num_rows) lse in fp32.
    """
    scale = how.factor(query.shape[3])
    if how.softcap is not None:
        return reference(query, kv, scale, softcap=how.softcap)
    return KERNELS[kernel_of(query.shape[2], kv)](query, kv, scale)


def kernel_of(rows: int, kv: KV) -> str:
    """The name in `KERNELS` of the kernel that `attend` uses for this many rows."""
    if kv.keys.device.type == "cpu":
        if kv.keys.dtype == torch.bfloat16 and not prefers_flash(rows, kv.keys.shape[2]):
            return "matmul"
        return "flash" if kv.is_even else "plain"
    return "flash" if _on_cuda(kv) else "plain"


def prefers_flash(rows: int, keys: int) -> bool:
    """Whether the flash kernel is the faster one in bf16 on a CPU."""
    if flash_has_matrix_units():
        return True
    return keys <= [most for least, most in FLASH_KEYS if least <= rows][-1]


def attend_padded(query: torch.Tensor, kv: KV, mask: torch.Tensor, how: Scoring) -> Attended:
    """Attention of several rows, each over its own keys, padded to one length.

    Args:
        query: (rows, num_kv_heads, group, head_dim).
        kv: of as many rows, finite also where it is masked.
        mask: (rows, 1, 1, num_keys), additive, of the query's dtype.
        how: see `attend`.

    Returns:
        (rows, num_kv_heads, group, value_dim) output, and (rows, num_kv_heads, group) lse in fp32.
        Both are undefined for a row whose keys are all masked.
    """
    keys, values = kv
    scale = how.factor(query.shape[3])
    if query.device.type == "cpu" and kv.is_even and how.softcap is None:
        output, lse = _OPS._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scale
        )
        return output, lse
    scores = (query.float() * scale) @ keys.float().transpose(2, 3)  # bf16 would round large ones
    scores = capped(scores, how.softcap) + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse


def attend_causal(query: torch.Tensor, kv: KV, how: Scoring) -> Attended:
    """Causal attention of as many rows as keys: row i sees keys 0 to i.

    Args:
        query: (1, num_heads, num_rows, head_dim).
        kv: of a batch of 1, of as many tokens.
        how: see `attend`.

    Returns:
        (1, num_heads, num_rows, value_dim) output, and (1, num_heads, num_rows) lse in fp32.
    """
    scale = how.factor(query.shape[3])
    if query.device.type == "cpu" and kv.is_even and how.softcap is None:
        return _flash(query, kv, scale, causal=True)
    kv = kv.repeated(query.shape[1] // kv.keys.shape[1])
    if how.softcap is None and _on_cuda(kv):
        return _flash(query, kv, scale, causal=True)
    return reference(query, kv, scale, causal=True, softcap=how.softcap)


def reference(
    query: torch.Tensor, kv: KV, scale: float, *, causal: bool = False, softcap: float | None = None
) -> Attended:
    """Attention and lse in plain torch, scores in fp32: the definition of this module's results.

    Shapes are those of `attend`, or with `causal` those of `attend_causal` with as many KV heads as
    heads. Without any key, the output is 0 and the lse is -inf.
    """
    keys, values = kv
    scores = capped((query.float() @ keys.float().transpose(2, 3)) * scale, softcap)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if keys.shape[2] else scores.new_full(scores.shape[:3], -torch.inf)
    weights = (scores - lse[..., None]).exp()
    return (weights @ values.float()).to(query.dtype), lse


def _flash(query: torch.Tensor, kv: KV, scale: float, *, causal: bool = False) -> Attended:
    """The kernel behind torch's attention on this device; it needs keys and values of one width.

    On a CPU it takes fewer KV heads than heads, and for a row that sees no key, output and lse are
    0.
    """
    if query.device.type == "cpu":
        output, lse = _OPS._scaled_dot_product_flash_attention_for_cpu(
            query, *kv, 0.0, causal, scale=scale
        )
        return output, lse
    if query.dtype in _SMALL:
        found = _OPS._scaled_dot_product_flash_attention(
            query, *kv, 0.0, causal, False, scale=scale
        )
    else:
        found = _OPS._scaled_dot_product_efficient_attention(
            query, *kv, None, True, 0.0, causal, scale=scale
        )
    return found[0], found[1][:, :, : query.shape[2]].float()  # some kernels pad the lse's rows


# The kernels that `attend` chooses from, by name.
KERNELS: dict[str, Callable[[torch.Tensor, KV, float], Attended]] = {
    "flash": _flash,
    "matmul": matmul_attention_lse,
    "plain": reference,
}


def _on_cuda(kv: KV) -> bool:
    """Whether torch's CUDA kernels can be used for these keys and values."""
    if kv.keys.device.type != "cuda" or not kv.is_even:
        return False
    return _cuda_works(kv.keys.dtype, kv.keys.shape[3], kv.keys.device)


@functools.cache
def _cuda_works(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether torch's CUDA kernel may be used; torch may change it between versions."""
    return gives_the_reference(_flash, dtype, head_dim, device)


def gives_the_reference(
    kernel: Callable[..., Attended], dtype: torch.dtype, head_dim: int, device: torch.device | str
) -> bool:
    """Whether a kernel gives what `reference` gives, tried on random tensors; warns if not.

    Args:
        kernel: called with query, KV, scale and `causal=True`.
    """
    query, *sides = torch.randn(3, 1, 2, 33, head_dim, device=device).to(dtype)
    expected = reference(query, KV(*sides), 0.2, causal=True)
    try:
        found = kernel(query, KV(*sides), 0.2, causal=True)
        good = all(
            torch.allclose(a.float(), b.float(), atol=0.03)
            for a, b in zip(found, expected, strict=True)
        )
        reason = "it gives other results"
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except (RuntimeError, AttributeError, TypeError) as error:
        good, reason = False, str(error)
    if not good:
        _log.warning("torch's attention kernel is not used, plain torch is: %s", reason)
    return good
