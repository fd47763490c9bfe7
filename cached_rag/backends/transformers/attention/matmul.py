"""Attention of few rows over many keys on a CPU, as two matrix products. Knows tensors only.

In bf16 the CPU's flash kernel of torch 2.13 reaches a third of the speed of the matrix product it
is made of. For few rows the scores fit the cache, so the plain form is the faster one: products in
bf16, softmax in fp32 inside. The memory for scores is kept: fresh memory would cost more in page
faults than the arithmetic.

Scores are rounded to bf16 before the softmax, so they must be small. Real keys are not: where
projections have biases (Qwen 2) they lie around a far point, and scores of hundreds lose all that
tells keys apart. What all keys have in common moves all of a row's scores alike, which the softmax
ignores; it is taken off first (as in SageAttention, arXiv:2410.02367).
"""

from __future__ import annotations

import itertools
import threading

import torch

# So many rows' scores over some thousand keys stay in the cache.
_LSE_ROWS = 384
# Below this a weight has lost digits.
_VANISHING = 1e-30
# The common part of keys is their mean; of every so many of them, for it need not be exact.
_CENTRE_STEP = 8


class _Scratch(threading.local):
    """Memory for scores, one block a dtype and thread; grows, never shrinks."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, valid until the next call for that dtype."""
        count = 1
        for size in shape:
            count *= size
        block = self._blocks.get(dtype)
        if block is None or block.numel() < count:
            with torch.inference_mode(False):  # else it could be written in inference mode alone
                block = self._blocks[dtype] = torch.empty(count, dtype=dtype)
        return block[:count].view(shape)


_scratch = _Scratch()


def prefers_matmul(query: torch.Tensor) -> bool:
    """Whether `matmul_attention` is the faster form for a (batch, heads, rows, dim) query."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


def centre_of(keys: torch.Tensor) -> torch.Tensor:
    """(head_dim,) what (num_keys, head_dim) keys have in common, in their dtype.

    Any vector is right; the nearer it is to the keys, the smaller are the scores of what is left.
    """
    return keys[::_CENTRE_STEP].mean(dim=0, dtype=torch.float32).to(keys.dtype)


def matmul_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """softmax(scale * query keys^T + mask) values, the heads of a group folded into the rows.

    Args:
        query: (batch, num_heads, num_rows, head_dim).
        keys, values: (batch, num_kv_heads, num_keys, dim).
        mask: (num_rows, num_masked), additive, for the last `num_masked` keys; None for none.
        scale: None for 1 / sqrt(head_dim).

    Returns:
        (batch, num_heads, num_rows, value_dim).
    """
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


def capped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """As `matmul_attention`, scores bent below a bound, in fp32; for any device.

    No kernel has this; and what keys have in common matters here, so it cannot be taken off.

    Args:
        mask: additive or bool, broadcast to (batch, num_heads, num_rows, num_keys).
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(groups, 1) for side in (keys, values))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = capped((query.float() @ keys.float().transpose(2, 3)) * factor, softcap)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores bent to stay below a bound, as Gemma 2 does; None for none."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def matmul_attention_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `matmul_attention` for rows that see all keys, with the log of the sum of exponentials.

    The sum is read off one weight of a row and its score, so it is as exact as the dtype's weights.

    Args:
        query: (1, num_kv_heads, num_rows, head_dim), the heads of a group being rows.
        keys, values: (1, num_kv_heads, num_keys, dim).

    Returns:
        (1, num_kv_heads, num_rows, value_dim), and (1, num_kv_heads, num_rows) in fp32.
    """
    scaled = query[0] * scale
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
    """Fill (rows, keys) weights; returns their rows' log-sum-exp in fp32."""
    torch.mm(query, keys, out=weights)
    first = weights[:, 0].float()
    torch.softmax(weights, dim=-1, out=weights)
    weight = weights[:, 0].float()
    if float(weight.min()) > _VANISHING:
        return first - weight.log()
    # The first key's weight says nothing; the largest one always does, but takes two more passes.
    torch.mm(query, keys, out=weights)
    largest = weights.amax(-1).float()
    torch.softmax(weights, dim=-1, out=weights)
    return largest - weights.amax(-1).float().log()
