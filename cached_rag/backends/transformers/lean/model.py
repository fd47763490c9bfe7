"""A whole model of lean layers: stands in for transformers' own forward pass in a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Cache

from cached_rag.backends.transformers.lean.layer import LeanLayer, Rotary, signed


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
