"""A leaner way through models whose layers are understood: the same numbers in fewer calls.

A `LeanModel` stands in for transformers' own forward pass in a `Decoder`; a layer takes about
fifteen calls of torch. Only named families are tried, since a feature that a short test does not
trigger would go unnoticed. What is made is a candidate: `probe.py` compares it with the model's own
pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn
from transformers import Cache

from cached_rag.backends.transformers.attention import attention
from cached_rag.backends.transformers.decoder import decoder_layers
from cached_rag.backends.transformers.few_bits import Groups, StoredLinear, form_of, joined, keep
from cached_rag.backends.transformers.packing import dense_of

Rotary = tuple[torch.Tensor, torch.Tensor]
# An MLP is several times as wide as what it is given: of a long prompt it takes so many rows at a
# time, which costs no time.
_MLP_ROWS = 1024
# Model types of transformers whose layers are what `LeanLayer` makes of them.
FAMILIES = frozenset(
    {
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "granite"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3"),
    }
)


class LeanLayer(nn.Module):
    """Attention and MLP with fused projections.

    Attributes:
        qkv: queries, keys and values in one product.
        gate_up: the MLP's gate and its input in one product.
        layer_idx: its number; the name is that of transformers.
        norm_*: a norm before or behind something, or of it; None where the layer has none.
    """

    def __init__(self, layer: Any, index: int) -> None:
        """Take over the modules of a transformers model's layer; the first projections are fused.

        Args:
            index: its number.
        """
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        if hasattr(own, "qkv_proj"):
            self.qkv, self.gate_up = own.qkv_proj, mlp.gate_up_proj
        else:
            self.qkv = _fused([own.q_proj, own.k_proj, own.v_proj])
            self.gate_up = _fused([mlp.gate_proj, mlp.up_proj])
        self.o, self.down = own.o_proj, mlp.down_proj
        middle = _norm(layer, "post_attention_layernorm")
        # Where there is a norm behind the MLP, the middle one is behind attention, too.
        has_more = hasattr(layer, "post_feedforward_layernorm")
        self.norm_before_attention = _norm(layer, "input_layernorm")
        self.norm_behind_attention = middle if has_more else None
        self.norm_before_mlp = _norm(layer, "pre_feedforward_layernorm") if has_more else middle
        self.norm_behind_mlp = _norm(layer, "post_feedforward_layernorm")
        self.norm_query, self.norm_key = _norm(own, "q_norm"), _norm(own, "k_norm")
        self.layer_idx, self.dim = index, own.head_dim
        queries = own.o_proj.in_features
        keys = (self.qkv.out_features - queries) // 2
        self.sizes = [queries, keys, keys]
        self.scaling = own.scaling
        self.softcap = getattr(own, "attn_logit_softcapping", None)  # Gemma 2
        self.rotates = bool(getattr(own, "use_rope", True))
        norm = getattr(own, "q_norm", None)  # OLMo 2's is over all heads at once
        self.norms_whole = norm is not None and norm.weight.numel() != self.dim
        self.activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
        # Of what attention and MLP add to their input (Granite).
        self._factor: float = getattr(layer, "residual_multiplier", 1.0)

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
        if hidden.shape[1] <= _MLP_ROWS:
            return self._added(hidden, self._mlp(hidden))
        blocks = torch.split(hidden, _MLP_ROWS, dim=1)
        parts = [self._added(rows, self._mlp(rows)) for rows in blocks]
        return torch.cat(parts, dim=1)

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(_normed(self.norm_before_mlp, hidden)).chunk(2, dim=-1)
        return _normed(self.norm_behind_mlp, self.down(self.activation(gate) * up))

    def _added(self, hidden: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return hidden + (more if self._factor == 1.0 else more * self._factor)

    def _attend(self, hidden: torch.Tensor, rotary: Rotary, cache: Cache) -> torch.Tensor:
        batch, rows, _ = hidden.shape
        query, keys, values = self._projected(self.qkv(hidden))
        if self.rotates:
            query, keys = rotated(query, rotary), rotated(keys, rotary)
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), self.layer_idx)
        asked = query.transpose(1, 2)
        found, _ = attention(
            self, asked, keys, values, None, scaling=self.scaling, softcap=self.softcap
        )
        projected: torch.Tensor = self.o(found.reshape(batch, rows, -1))
        return projected

    def _projected(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (batch, num_rows, heads, dim), the first two normed."""
        split = (*qkv.shape[:2], -1, self.dim)
        query, keys, values = torch.split(qkv, self.sizes, dim=-1)
        if self.norms_whole:
            query, keys = _normed(self.norm_query, query), _normed(self.norm_key, keys)
        query, keys, values = (part.view(split) for part in (query, keys, values))
        if not self.norms_whole:
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
    """Rotate (batch, num_rows, heads, dim) by position: dimension i with i + rotary_dim / 2.

    In the wider of both dtypes (OLMo 2 has its tables in fp32), rounded to that of the states.
    """
    cos, sin = (part.unsqueeze(2) for part in rotary)
    width = cos.shape[-1]
    if width < states.shape[-1]:
        turned = rotated(states[..., :width], rotary)
        return torch.cat([turned, states[..., width:]], dim=-1)
    return torch.addcmul(states * cos, states.roll(width // 2, dims=-1), sin).to(states.dtype)


class LeanModel(nn.Module):
    """Embeddings, layers, head; takes and returns what a transformers model does.

    It shares its weights with the model it stands for, whose embeddings, rotary tables and head it
    calls; only the layers are its own.

    Attributes:
        base_model: itself; called without `logits_to_keep`, it computes no logits.
    """

    def __init__(self, own: Any) -> None:
        """Stand in for a transformers causal LM."""
        super().__init__()
        inner, layers = own.base_model, decoder_layers(own)
        self.embed_tokens, self.rotary_emb = inner.embed_tokens, inner.rotary_emb
        self.layers = nn.ModuleList(LeanLayer(one.module, n) for n, one in enumerate(layers))
        self.norm = lean_norm(inner.norm)
        self.lm_head = own.get_output_embeddings()
        # What else each layer's rotation is given: in models with windows the layer's kind.
        asks_kind = "layer_type" in inspect.signature(inner.rotary_emb.forward).parameters
        self._types = tuple((layer.kind,) if asks_kind else () for layer in layers)
        self._embedding_factor = getattr(inner, "embedding_multiplier", 1.0)
        self._finish = _finisher(own.config.get_text_config())

    @property
    def base_model(self) -> LeanModel:
        """The model without its head."""
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
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
        tables = {
            kind: signed(*self.rotary_emb(hidden, position_ids, *kind)) for kind in set(self._types)
        }
        for layer, kind in zip(self.layers, self._types, strict=True):
            hidden = layer(hidden, position_embeddings=tables[kind], cache=cache)
        if logits_to_keep is None:
            return SimpleNamespace(logits=None)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self._finish(self.lm_head(self.norm(hidden[:, rows]))))


def _finisher(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a model does to its head's output: a divisor (Granite), a bound (Gemma), or nothing."""
    divisor: float | None = getattr(config, "logits_scaling", None)
    bound: float | None = getattr(config, "final_logit_softcapping", None)
    if divisor is not None:
        return lambda logits: logits / divisor
    if bound is not None:
        return lambda logits: torch.tanh(logits / bound) * bound
    return lambda logits: logits


@torch.no_grad()
def lean_model(model: Any) -> LeanModel | None:
    """The lean form of a causal LM; None if its family, its layers or their weights are unknown.

    Effects: the model's projections become views of fused weights, so that the weights are held
    once.
    """
    config = model.config.get_text_config()
    inner = model.base_model
    is_plain = all(hasattr(inner, part) for part in ("rotary_emb", "embed_tokens", "norm"))
    if config.model_type not in FAMILIES or not is_plain:  # a text model inside one of images
        return None
    linears = [part for part in inner.layers.modules() if hasattr(part, "in_features")]
    # Others' layers and weights cannot be joined (bitsandbytes, torchao).
    are_plain = all(type(part) in (nn.Linear, StoredLinear) for part in linears)
    are_plain &= all(type(weight) is nn.Parameter for weight in inner.layers.parameters())
    return LeanModel(model) if are_plain else None


def _norm(owner: Any, name: str) -> nn.Module | None:
    found = getattr(owner, name, None)
    return None if found is None else lean_norm(found)


def _fused(linears: Sequence[nn.Linear | StoredLinear]) -> nn.Linear | StoredLinear:
    """One linear layer with the outputs of several, which remember their part of it as `whole`."""
    stored = [linear for linear in linears if isinstance(linear, StoredLinear)]
    if len(stored) == len(linears):
        whole: nn.Linear | StoredLinear = StoredLinear.joined(stored)
    else:
        dtype = next(one.weight.dtype for one in linears if isinstance(one, nn.Linear))
        whole = _dense(
            [one if isinstance(one, nn.Linear) else dense_of(one, dtype) for one in linears]
        )
    end = 0
    for linear in linears:
        begin, end = end, end + linear.out_features
        vars(linear)["whole"] = (whole, slice(begin, end))  # not as a part of the module
    return whole


def _dense(linears: Sequence[nn.Linear]) -> nn.Linear:
    """As `_fused`, for ordinary layers, whose weights become views of the whole's."""
    first, sizes = linears[0], [linear.out_features for linear in linears]
    whole = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    for name, _ in first.named_parameters():
        every = torch.cat([getattr(linear, name).data for linear in linears])
        setattr(whole, name, nn.Parameter(every, requires_grad=False))
        for linear, part in zip(linears, torch.split(every, sizes), strict=True):
            getattr(linear, name).data = part
    forms = [form for linear in linears if (form := form_of(linear))]
    groups = [form for form in forms if isinstance(form, Groups)]
    if forms:  # what the finest of them needs
        keep(whole, joined(groups) if len(groups) == len(linears) else "int8")
    return whole


class RMSNorm(nn.Module):
    """x / rms(x) * weight, or Gemma's x / rms(x) * (1 + weight), whose product is in fp32.

    Shares its weight with the norm it stands for.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, adds_one: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.adds_one = weight, eps, adds_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., dim) of the same shape and dtype."""
        if not self.adds_one:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        weight = self.weight.float() + 1
        return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)


def lean_norm(norm: nn.Module) -> nn.Module:
    """The same norm in one call of torch; the module itself if it is of another kind."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return norm
    sample = torch.linspace(-2, 3, weight.numel(), device=weight.device).to(weight.dtype)
    expected = norm(sample)
    for adds_one in (False, True):
        found = RMSNorm(weight, eps, adds_one=adds_one)
        if torch.allclose(found(sample).float(), expected.float(), rtol=0.02, atol=1e-4):
            return found
    return norm
