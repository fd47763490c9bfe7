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

from cached_rag.lse_attention import Attended, attend, attend_causal


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


def relay_attention(
    query: torch.Tensor, shared: Sequence[Part], private: Sequence[Part], scale: float | None = None
) -> torch.Tensor:
    """Attention of all tokens of a batch over what they share and over what is their row's own.

    Args:
        query: (num_tokens, num_heads, head_dim), row after row.
        shared: runs whose tokens see every key of them.
        private: for each row its tokens (a slice) and its own keys; the last of these are the
            tokens', of which each sees those before it and itself.
        scale: softmax scale; None for 1 / sqrt(head_dim).

    Returns:
        (num_tokens, num_heads, value_dim).
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows = [_private(query, part, factor) for part in private]
    output = torch.cat([found for found, _ in rows])
    if not shared:
        return output
    output, lse = output.float(), torch.cat([found for _, found in rows])
    for part in shared:
        found = _seen_by_all(_taken(query, part.tokens), part.keys, part.values, factor)
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


def _private(query: torch.Tensor, part: Part, scale: float) -> Attended:
    """(tokens, num_heads, value_dim) and (tokens, num_heads) of one row over its own keys."""
    asked = _taken(query, part.tokens)
    before = part.keys.shape[2] - len(asked)
    if len(asked) == 1:
        return _seen_by_all(asked, part.keys, part.values, scale)
    fresh = part.keys[:, :, before:], part.values[:, :, before:]
    found, lse = attend_causal(asked.transpose(0, 1)[None], *fresh, scale)
    own = found[0].transpose(0, 1), lse[0].transpose(0, 1)
    if not before:
        return own
    earlier = part.keys[:, :, :before], part.values[:, :, :before]
    output, lse = merge(own, _seen_by_all(asked, *earlier, scale))
    return output.to(query.dtype), lse


def _seen_by_all(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> Attended:
    """As `_private`, every token seeing every key."""
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if count == 1:
        found, lse = attend(query.view(1, kv_heads, -1, dim), keys, values, scale)
        return found.reshape(1, heads, -1), lse.reshape(1, heads)
    # Tokens and the heads of a group side by side: each key is read once for all of them.
    folded = query.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    found, lse = attend(folded, keys, values, scale)
    found = found.view(kv_heads, count, -1, values.shape[3]).transpose(0, 1)
    lse = lse.view(kv_heads, count, -1).transpose(0, 1)
    return found.reshape(count, heads, -1), lse.reshape(count, heads)
