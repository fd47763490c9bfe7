"""A model of lean layers: stands in for transformers' own forward pass in a `Decoder`.

A layer takes about fifteen calls of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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


class LeanModel(nn.Module):
    """Embeddings, layers, head; takes and returns what a transformers model does.

    It shares its weights with the model it stands for, whose embeddings, rotary tables and head it
    calls; only the layers are its own.

    Attributes:
        base_model: itself; called without `logits_to_keep`, it computes no logits.
    """

    def __init__(
        self, own: Any, layers: Sequence[LeanLayer], norm: nn.Module, layer_types: Sequence[str]
    ) -> None:
        """Stand in for a model.

        Args:
            own: a transformers causal LM.
            norm: the norm behind the last layer.
            layer_types: of each layer, the kind of rotation it asks for; equal for all but models
                with sliding windows.
        """
        super().__init__()
        inner, config = own.base_model, own.config.get_text_config()
        self.embed_tokens, self.rotary_emb = inner.embed_tokens, inner.rotary_emb
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.lm_head = own.get_output_embeddings()
        self._types = tuple(layer_types)
        self._embedding_factor = getattr(inner, "embedding_multiplier", 1.0)
        self._finish = _finisher(config)

    @property
    def base_model(self) -> LeanModel:
        """The model without its head."""
        return self

    def get_input_embeddings(self) -> nn.Module:
        """As a transformers model's."""
        found: nn.Module = self.embed_tokens
        return found

    def get_output_embeddings(self) -> nn.Module:
        """As a transformers model's."""
        return self.lm_head  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        use_cache: bool = True,
        logits_to_keep: int | torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """`.logits`, (batch, num_logits, vocab_size); none without `logits_to_keep`.

        Args:
            input_ids, position_ids: (batch, num_rows) int64.
            logits_to_keep: how many of the last rows get logits, or which rows do.
        """
        hidden = self.embed_tokens(input_ids)
        if self._embedding_factor != 1.0:
            hidden = hidden * self._embedding_factor
        tables = self._rotary(hidden, position_ids)
        for layer, kind in zip(self.layers, self._types, strict=True):
            hidden = layer(hidden, position_embeddings=tables[kind], cache=cache)
        if logits_to_keep is None:
            return SimpleNamespace(logits=None)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self._finish(self.lm_head(self.norm(hidden[:, rows]))))

    def _rotary(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Rotary]:
        """Cosines and sines for each kind of layer."""
        kinds = set(self._types)
        if kinds == {""}:
            return {"": signed(*self.rotary_emb(hidden, position_ids))}
        return {kind: signed(*self.rotary_emb(hidden, position_ids, kind)) for kind in kinds}


def _finisher(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a model does to its head's output: a divisor (Granite), a bound (Gemma), or nothing."""
    divisor: float | None = getattr(config, "logits_scaling", None)
    bound: float | None = getattr(config, "final_logit_softcapping", None)
    if divisor is not None:
        return lambda logits: logits / divisor
    if bound is not None:
        return lambda logits: torch.tanh(logits / bound) * bound
    return lambda logits: logits
