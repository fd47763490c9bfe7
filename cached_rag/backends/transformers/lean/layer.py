"""One decoder layer in about fifteen calls of torch. Knows tensors and linear layers; no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Cache

from cached_rag.backends.transformers.attention.scattered import attention

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadShapes:
    """How a layer attends.

    Attributes:
        count, kv_count, dim: number of heads, of KV heads, and the width of each.
        scaling: factor of the scores.
        softcap: bound of the scores (Gemma 2); None for none.
        rotates: whether queries and keys are rotated by position.
        norms_whole: norms of queries and keys are over all heads at once (OLMo 2), not over each.
    """

    count: int
    kv_count: int
    dim: int
    scaling: float
    softcap: float | None = None
    rotates: bool = True
    norms_whole: bool = False


@dataclass(frozen=True)
class Norms:
    """A layer's norms; None where it has none. Names say what they stand before or behind."""

    before_attention: nn.Module | None
    behind_attention: nn.Module | None
    before_mlp: nn.Module | None
    behind_mlp: nn.Module | None
    query: nn.Module | None
    key: nn.Module | None


class LeanLayer(nn.Module):
    """Attention and MLP with fused projections.

    Attributes:
        qkv: queries, keys and values in one product.
        gate_up: the MLP's gate and its input in one product.
        layer_idx: its number; the name is that of transformers.
    """

    qkv: Callable[[torch.Tensor], torch.Tensor]
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    o: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    norm_before_attention: nn.Module | None
    norm_behind_attention: nn.Module | None
    norm_before_mlp: nn.Module | None
    norm_behind_mlp: nn.Module | None
    norm_query: nn.Module | None
    norm_key: nn.Module | None

    def __init__(
        self,
        index: int,
        heads: HeadShapes,
        norms: Norms,
        linears: dict[str, nn.Module],
        activation: Callable[[torch.Tensor], torch.Tensor],
        residual_factor: float = 1.0,
    ) -> None:
        """Put a layer together.

        Args:
            linears: `qkv`, `o`, `gate_up` and `down`.
            residual_factor: of what attention and MLP add to their input (Granite).
        """
        super().__init__()
        self.layer_idx, self.heads = index, heads
        for name, linear in linears.items():
            self.add_module(name, linear)
        for name, norm in vars(norms).items():
            self.register_module(f"norm_{name}", norm)
        self.activation, self._factor = activation, residual_factor

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotary, cache: Cache
    ) -> torch.Tensor:
        """The layer's (batch, num_rows, hidden_size) output.

        Args:
            position_embeddings: (batch, num_rows, rotary_dim) cosines and signed sines, see
                `signed`.
            cache: takes the rows' KV and returns the KV they attend to.
        """
        hidden = _normed(self.norm_before_attention, hidden_states)
        hidden = self._attend(hidden, position_embeddings, cache)
        hidden = self._added(hidden_states, _normed(self.norm_behind_attention, hidden))
        gate, up = self.gate_up(_normed(self.norm_before_mlp, hidden)).chunk(2, dim=-1)
        output = _normed(self.norm_behind_mlp, self.down(self.activation(gate) * up))
        return self._added(hidden, output)

    def _added(self, hidden: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return hidden + (more if self._factor == 1.0 else more * self._factor)

    def _attend(self, hidden: torch.Tensor, rotary: Rotary, cache: Cache) -> torch.Tensor:
        batch, rows, _ = hidden.shape
        heads = self.heads
        query, keys, values = self._projected(self.qkv(hidden))
        if heads.rotates:
            query, keys = rotated(query, rotary), rotated(keys, rotary)
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), self.layer_idx)
        asked = query.transpose(1, 2)
        found, _ = attention(
            self, asked, keys, values, None, scaling=heads.scaling, softcap=heads.softcap
        )
        return self.o(found.reshape(batch, rows, -1))

    def _projected(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (batch, num_rows, heads, dim), the first two normed."""
        heads, split = self.heads, (*qkv.shape[:2], -1, self.heads.dim)
        sizes = [count * heads.dim for count in (heads.count, heads.kv_count, heads.kv_count)]
        query, keys, values = torch.split(qkv, sizes, dim=-1)
        if heads.norms_whole:
            query, keys = _normed(self.norm_query, query), _normed(self.norm_key, keys)
        query, keys, values = (part.view(split) for part in (query, keys, values))
        if not heads.norms_whole:
            query, keys = _normed(self.norm_query, query), _normed(self.norm_key, keys)
        return query, keys, values


def _normed(norm: nn.Module | None, hidden: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = hidden if norm is None else norm(hidden)
    return found


def signed(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """Cosines, and sines whose first half is negated, so that `rotated` need not negate."""
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat([-first, second], dim=-1)


def rotated(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate (batch, num_rows, heads, dim) by position: dimension i with i + rotary_dim / 2."""
    cos, sin = (part.unsqueeze(2) for part in rotary)
    width = cos.shape[-1]
    if width < states.shape[-1]:
        turned = rotated(states[..., :width], rotary)
        return torch.cat([turned, states[..., width:]], dim=-1)
    return torch.addcmul(states * cos, states.roll(width // 2, dims=-1), sin)
