"""Attention of many rows over keys that they share: read once for all of them.

Softmax attention over several runs of keys is the average of the attention over each, weighted by
the runs' sums of exponentials (RelayAttention, section 3.3; the sums travel as their logarithms,
appendix A). There one system prompt is shared by a whole batch; here any run of keys by any of its
rows, so that prefixes may form trees (appendix D). Knows tensors; knows no prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.transformers.attention.kernels import (
    Attended,
    attend,
    attend_causal,
    attend_padded,
)


@dataclass(frozen=True)
class Part:
    """A run of keys, and the tokens of the batch that see it.

    Attributes:
        keys, values: (1, num_kv_heads, num_keys, dim).
        tokens: which of the batch's tokens; None for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: slice | torch.Tensor | None = None


@dataclass(frozen=True)
class Padded:
    """Single tokens of several rows, whose own keys lie in one tensor.

    Attributes:
        keys, values: (num_rows, num_kv_heads, num_keys, dim).
        mask: (num_rows, 1, 1, num_keys), see `attend_padded`.
        tokens: (n,) which of the batch's tokens.
        rows: (n,) whose keys they see.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor


def relay_attention(
    query: torch.Tensor,
    shared: Sequence[Part],
    private: Sequence[Part | Padded],
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of all tokens of a batch over what they share and over what is their row's own.

    Args:
        query: (num_tokens, num_heads, head_dim), row after row.
        shared: runs whose tokens see every key of them.
        private: each token's row's own keys, once. Of a part, the last keys are its tokens' (a
            slice), of which each sees those before it and itself.
        scale: softmax scale; None for 1 / sqrt(head_dim).
        softcap: what scores are bent to stay below; None for no bound.

    Returns:
        (num_tokens, num_heads, value_dim).
    """
    how = (query.shape[-1] ** -0.5 if scale is None else scale, softcap)
    count, heads, _ = query.shape
    output = query.new_empty(count, heads, private[0].values.shape[-1], dtype=torch.float32)
    lse = query.new_empty(count, heads, dtype=torch.float32)
    for own in private:
        found = _private(query, own, *how)
        output[own.tokens], lse[own.tokens] = found[0].float(), found[1]
    for part in shared:
        found = _seen_by_all(_taken(query, part.tokens), part.keys, part.values, *how)
        _merge_into(output, lse, part.tokens, found)
    return output.to(query.dtype)


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over two runs of keys, from that over each (equations 7 and 11)."""
    lse = torch.logaddexp(first[1], second[1])
    parts = [found * (own - lse).exp()[..., None] for found, own in (first, second)]
    return parts[0] + parts[1], lse


def _merge_into(
    output: torch.Tensor, lse: torch.Tensor, tokens: slice | torch.Tensor | None, found: Attended
) -> None:
    every = slice(None) if tokens is None else tokens
    output[every], lse[every] = merge((output[every], lse[every]), found)


def _taken(query: torch.Tensor, tokens: slice | torch.Tensor | None) -> torch.Tensor:
    return query if tokens is None else query[tokens]


def _padded(query: torch.Tensor, own: Padded, scale: float, softcap: float | None) -> Attended:
    """As `_private`, for single tokens of several rows."""
    count, kv_heads = own.keys.shape[:2]
    _, heads, dim = query.shape
    asked = query.new_zeros(count, heads, dim)
    asked[own.rows] = query[own.tokens]
    folded = asked.view(count, kv_heads, -1, dim)
    found, lse = attend_padded(folded, own.keys, own.values, own.mask, scale, softcap)
    return found.reshape(count, heads, -1)[own.rows], lse.reshape(count, heads)[own.rows]


def _private(
    query: torch.Tensor, part: Part | Padded, scale: float, softcap: float | None
) -> Attended:
    """(tokens, num_heads, value_dim) and (tokens, num_heads) of one row over its own keys."""
    if isinstance(part, Padded):
        return _padded(query, part, scale, softcap)
    asked = _taken(query, part.tokens)
    before = part.keys.shape[2] - len(asked)
    if len(asked) == 1:
        return _seen_by_all(asked, part.keys, part.values, scale, softcap)
    fresh = part.keys[:, :, before:], part.values[:, :, before:]
    found, lse = attend_causal(asked.transpose(0, 1)[None], *fresh, scale, softcap)
    own = found[0].transpose(0, 1), lse[0].transpose(0, 1)
    if not before:
        return own
    earlier = part.keys[:, :, :before], part.values[:, :, :before]
    return merge(own, _seen_by_all(asked, *earlier, scale, softcap))


def _seen_by_all(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> Attended:
    """As `_private`, every token seeing every key."""
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if count == 1:
        found, lse = attend(query.view(1, kv_heads, -1, dim), keys, values, scale, softcap)
        return found.reshape(1, heads, -1), lse.reshape(1, heads)
    # Tokens and the heads of a group side by side: each key is read once for all of them.
    folded = query.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    found, lse = attend(folded, keys, values, scale, softcap)
    found = found.view(kv_heads, count, -1, values.shape[3]).transpose(0, 1)
    lse = lse.view(kv_heads, count, -1).transpose(0, 1)
    return found.reshape(count, heads, -1), lse.reshape(count, heads)
