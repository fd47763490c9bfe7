"""RelayAttention: rows of a batch share runs of keys, and each run is read once for all its rows.

Attention over several runs of keys is the average of the attention over each run, weighted by the
runs' sums of exponentials (RelayAttention, section 3.3; the sums are kept as logarithms, appendix
A). In the paper, one system prompt is shared by the whole batch. Here any rows of a batch may share
any run of keys, so that shared prefixes may form trees (appendix D). Knows tensors; knows no
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.transformers.attention.kernels import (
    Attended,
    Scoring,
    attend,
    attend_causal,
    attend_padded,
)


@dataclass(frozen=True)
class Part:
    """A run of keys, and the tokens of the batch that see it.

    Attributes:
        keys, values: (1, num_kv_heads, num_keys, dim).
        tokens: which of the batch's tokens see the keys; None for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: slice | torch.Tensor | None = None


@dataclass(frozen=True)
class Padded:
    """Several rows with one token each, their own keys side by side in one padded tensor.

    Attributes:
        keys, values: (num_rows, num_kv_heads, num_keys, dim).
        mask: (num_rows, 1, 1, num_keys), see `attend_padded`.
        tokens: (n,) which of the batch's tokens these are.
        rows: (n,) for each of these tokens, the index of its row in `keys`.
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
    how: Scoring = Scoring(),  # noqa: B008
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
    scale, softcap = how.factor(query.shape[-1]), how.softcap
    count, heads, _ = query.shape
    output = query.new_empty(count, heads, private[0].values.shape[-1], dtype=torch.float32)
    lse = query.new_empty(count, heads, dtype=torch.float32)
    for own in private:
        found = _private(query, own, scale, softcap)
        output[own.tokens], lse[own.tokens] = found[0].float(), found[1]
    for part in shared:
        asked = _taken(query, part.tokens)
        found = _seen_by_all(asked, part.keys, part.values, scale, softcap)
        every = slice(None) if part.tokens is None else part.tokens
        output[every], lse[every] = merge((output[every], lse[every]), found)
    return output.to(query.dtype)


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over two runs of keys, from the attention over each (equations 7 and 11)."""
    lse = torch.logaddexp(first[1], second[1])
    parts = [found * (own - lse).exp()[..., None] for found, own in (first, second)]
    return parts[0] + parts[1], lse


def _taken(query: torch.Tensor, tokens: slice | torch.Tensor | None) -> torch.Tensor:
    return query if tokens is None else query[tokens]


def _padded(query: torch.Tensor, own: Padded, scale: float, softcap: float | None) -> Attended:
    """As `_private`, for several rows with one token each."""
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
    """A row's tokens over its own keys: (tokens, num_heads, value_dim), (tokens, num_heads) lse."""
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
    """As `_private`, for keys all of which every token sees."""
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if count == 1:
        found, lse = attend(query.view(1, kv_heads, -1, dim), keys, values, scale, softcap)
        return found.reshape(1, heads, -1), lse.reshape(1, heads)
    # Tokens and the heads of a group become rows of one product, so each key is read once.
    folded = query.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    found, lse = attend(folded, keys, values, scale, softcap)
    found = found.view(kv_heads, count, -1, values.shape[3]).transpose(0, 1)
    lse = lse.view(kv_heads, count, -1).transpose(0, 1)
    return found.reshape(count, heads, -1), lse.reshape(count, heads)
