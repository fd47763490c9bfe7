"""Attention that also returns each row's log-sum-exp, by the fastest kernel of the device.

The log-sum-exp (lse) of a row is the logarithm of its softmax's denominator. With it, the results
over parts of the keys can be merged into the result over all keys (RelayAttention, equation 12).
Knows tensors only; `reference` is the definition.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from cached_rag.backends.transformers.attention.matmul import (
    capped,
    flash_has_matrix_units,
    matmul_attention_lse,
)

_log = logging.getLogger(__name__)
_OPS = torch.ops.aten
# In bf16 on a CPU without matrix units, products are faster than torch's flash kernel once the keys
# no longer fit the cache. Pairs (rows, keys), ascending: with at least this many rows, flash is
# used up to this many keys. Each head of a group counts as a row.
# `python -m docs.experiments kernels` times both.
FLASH_KEYS = ((1, 16384), (48, 8192), (96, 3072), (192, 2048), (384, 1024))
_SMALL = (torch.bfloat16, torch.float16)

Attended = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> Attended:
    """Attention in which every row sees every key.

    Args:
        query: (1, num_kv_heads, num_rows, head_dim); the query heads that share a KV head are rows.
        keys, values: (1, num_kv_heads, num_keys, dim); at least one key.
        scale: factor of the scores.
        softcap: bound of the scores, see `capped`; with one, plain torch computes.

    Returns:
        (1, num_kv_heads, num_rows, value_dim) output, and (1, num_kv_heads, num_rows) lse in fp32.
    """
    if softcap is not None:
        return reference(query, keys, values, scale, softcap=softcap)
    return KERNELS[kernel_of(query.shape[2], keys, values)](query, keys, values, scale)


def kernel_of(rows: int, keys: torch.Tensor, values: torch.Tensor) -> str:
    """The name in `KERNELS` of the kernel that `attend` uses for this many rows."""
    if keys.device.type == "cpu":
        if keys.dtype == torch.bfloat16 and not prefers_flash(rows, keys.shape[2]):
            return "matmul"
        return "flash" if keys.shape[3] == values.shape[3] else "plain"
    return "flash" if _on_cuda(keys, values) else "plain"


def prefers_flash(rows: int, keys: int) -> bool:
    """Whether the flash kernel is the faster one in bf16 on a CPU."""
    if flash_has_matrix_units():
        return True
    return keys <= [most for least, most in FLASH_KEYS if least <= rows][-1]


def attend_padded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> Attended:
    """Attention of several rows, each over its own keys, padded to one length.

    Args:
        query: (rows, num_kv_heads, group, head_dim).
        keys, values: (rows, num_kv_heads, num_keys, dim), finite also where they are masked.
        mask: (rows, 1, 1, num_keys), additive, of the query's dtype.

    Returns:
        (rows, num_kv_heads, group, value_dim) output, and (rows, num_kv_heads, group) lse in fp32.
        Both are undefined for a row whose keys are all masked.
    """
    is_even = keys.shape[3] == values.shape[3]
    if query.device.type == "cpu" and is_even and softcap is None:
        return _cpu(query, keys, values, scale, causal=False, mask=mask)
    scores = capped((query @ keys.transpose(2, 3)).float() * scale, softcap) + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse


def attend_causal(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> Attended:
    """Causal attention of as many rows as keys: row i sees keys 0 to i.

    Args:
        query: (1, num_heads, num_rows, head_dim).
        keys, values: (1, num_kv_heads, num_rows, dim).

    Returns:
        (1, num_heads, num_rows, value_dim) output, and (1, num_heads, num_rows) lse in fp32.
    """
    is_even = keys.shape[3] == values.shape[3]
    if query.device.type == "cpu" and is_even and softcap is None:
        return _cpu(query, keys, values, scale, causal=True)
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    if softcap is None and _on_cuda(keys, values):
        return _cuda(query, keys, values, scale, causal=True)
    return reference(query, keys, values, scale, causal=True, softcap=softcap)


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    softcap: float | None = None,
) -> Attended:
    """Attention and lse in plain torch, scores in fp32: the definition of this module's results.

    Shapes are those of `attend`, or with `causal` those of `attend_causal` with as many KV heads as
    heads. Without any key, the output is 0 and the lse is -inf.
    """
    scores = capped((query.float() @ keys.float().transpose(2, 3)) * scale, softcap)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if keys.shape[2] else scores.new_full(scores.shape[:3], -torch.inf)
    weights = (scores - lse[..., None]).exp()
    return (weights @ values.float()).to(query.dtype), lse


def _flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Attended:
    """The device's flash kernel, which needs keys and values of one width."""
    kernel = _cpu if query.device.type == "cpu" else _cuda
    return kernel(query, keys, values, scale, causal=False)


# The kernels that `attend` chooses from, by name.
KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Attended]] = {
    "flash": _flash,
    "matmul": matmul_attention_lse,
    "plain": reference,
}


def _cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> Attended:
    """The kernel behind torch's attention on CPUs; it takes fewer KV heads than heads.

    For a row that sees no key, output and lse are 0.
    """
    output, lse = _OPS._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, lse


def _cuda(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> Attended:
    if query.dtype in _SMALL:
        found = _OPS._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
    else:
        found = _OPS._scaled_dot_product_efficient_attention(
            query, keys, values, None, True, 0.0, causal, scale=scale
        )
    return found[0], found[1][:, :, : query.shape[2]].float()  # some kernels pad the lse's rows


def _on_cuda(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch's CUDA kernels can be used for these keys and values."""
    same_width = keys.shape[3] == values.shape[3]
    return keys.device.type == "cuda" and same_width and _cuda_works(keys.dtype, keys.shape[3])


@functools.cache
def _cuda_works(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's CUDA kernel may be used; torch may change it between versions."""
    return gives_the_reference(_cuda, dtype, head_dim, "cuda")


def gives_the_reference(
    kernel: Callable[..., Attended], dtype: torch.dtype, head_dim: int, device: str
) -> bool:
    """Whether a kernel gives what `reference` gives, tried on random tensors; warns if not.

    Args:
        kernel: called with query, keys, values, scale and `causal=True`.
    """
    query, keys, values = torch.randn(3, 1, 2, 33, head_dim, device=device).to(dtype)
    expected = reference(query, keys, values, 0.2, causal=True)
    try:
        found = kernel(query, keys, values, 0.2, causal=True)
        good = all(
            torch.allclose(a.float(), b.float(), atol=0.03)
            for a, b in zip(found, expected, strict=True)
        )
        reason = "it gives other results"
    except (RuntimeError, AttributeError, TypeError) as error:
        good, reason = False, str(error)
    if not good:
        _log.warning("torch's attention kernel is not used, plain torch is: %s", reason)
    return good
