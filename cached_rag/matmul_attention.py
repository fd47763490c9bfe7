"""Attention of few rows over many keys on a CPU, as two matrix products. Knows tensors only.

In bf16 the CPU's flash kernel of torch 2.13 reaches a third of the speed of the matrix product it
is made of. For few rows the scores fit the cache, so the plain form is the faster one: products in
bf16, softmax in fp32 inside, as in transformers' eager attention. The memory for scores is kept:
fresh memory would cost more in page faults than the arithmetic.
"""

from __future__ import annotations

import itertools
import threading

import torch


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
            block = self._blocks[dtype] = torch.empty(count, dtype=dtype)
        return block[:count].view(shape)


_scratch = _Scratch()


def prefers_matmul(query: torch.Tensor) -> bool:
    """Whether `matmul_attention` is the faster form for a (batch, heads, rows, dim) query."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


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
        torch.mm(folded[row, head], keys[row, head].T, out=scores)
        if mask is not None:
            by_head[:, :, count - mask.shape[1] :] += mask
        torch.softmax(scores, dim=-1, out=scores)  # in fp32 inside, whatever the dtype
        torch.mm(scores, values[row, head], out=output[row, head])
    return output.view(batch, heads, rows, -1)
