"""Makes the lean form of a transformers model, where its layers are understood.

Only named families are tried, since a feature that a short test does not trigger would go
unnoticed. What is made is a candidate: `probe.py` compares it with the model's own pass.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from cached_rag.backends.transformers.decoder import decoder_layers
from cached_rag.backends.transformers.lean.model import HeadShapes, LeanLayer, LeanModel, Norms
from cached_rag.backends.transformers.weights.groups import (
    Groups,
    StoredLinear,
    form_of,
    joined,
    keep,
)
from cached_rag.backends.transformers.weights.packing import dense_of

# Model types of transformers whose layers are what `_layer` makes of them.
FAMILIES = frozenset(
    {
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "granite"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3"),
    }
)


@torch.no_grad()
def lean_model(model: Any) -> LeanModel | None:
    """The lean form of a causal LM; None if its family, or what is around it, is unknown here.

    Effects: the model's projections become views of fused weights, so that the weights are held
    once.
    """
    config = model.config.get_text_config()
    inner = model.base_model
    is_plain = all(hasattr(inner, part) for part in ("rotary_emb", "embed_tokens", "norm"))
    if config.model_type not in FAMILIES or not is_plain:  # a text model inside one of images
        return None
    asks_kind = "layer_type" in inspect.signature(inner.rotary_emb.forward).parameters
    types = list(config.layer_types) if asks_kind else [""] * config.num_hidden_layers
    layers = [_layer(layer, index) for index, layer in enumerate(decoder_layers(model))]
    return LeanModel(model, layers, lean_norm(inner.norm), types)


def _layer(layer: Any, index: int) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        fused = {"qkv": attention.qkv_proj, "gate_up": mlp.gate_up_proj}
    else:
        fused = {
            "qkv": _fused([attention.q_proj, attention.k_proj, attention.v_proj]),
            "gate_up": _fused([mlp.gate_proj, mlp.up_proj]),
        }
    return LeanLayer(
        index,
        _heads(attention, fused["qkv"].out_features),
        _norms(layer),
        {**fused, "o": attention.o_proj, "down": mlp.down_proj},
        getattr(mlp, "act_fn", None) or mlp.activation_fn,
        getattr(layer, "residual_multiplier", 1.0),
    )


def _heads(attention: Any, width: int) -> HeadShapes:
    """How a layer attends, from its attention module and the width of its fused projection."""
    dim: int = attention.head_dim
    count = attention.o_proj.in_features // dim
    query_norm = getattr(attention, "q_norm", None)
    return HeadShapes(
        count=count,
        kv_count=(width // dim - count) // 2,
        dim=dim,
        scaling=attention.scaling,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        rotates=bool(getattr(attention, "use_rope", True)),
        norms_whole=query_norm is not None and query_norm.weight.numel() != dim,
    )


def _norms(layer: Any) -> Norms:
    """A layer's norms: one name means another place where there are norms behind the sums, too."""
    names = ("input_layernorm", "post_attention_layernorm")
    more = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    found = {name: _lean(getattr(layer, name, None)) for name in (*names, *more)}
    has_more = found["post_feedforward_layernorm"] is not None
    return Norms(
        before_attention=found["input_layernorm"],
        behind_attention=found["post_attention_layernorm"] if has_more else None,
        before_mlp=found["pre_feedforward_layernorm" if has_more else "post_attention_layernorm"],
        behind_mlp=found["post_feedforward_layernorm"],
        query=_lean(getattr(layer.self_attn, "q_norm", None)),
        key=_lean(getattr(layer.self_attn, "k_norm", None)),
    )


def _lean(norm: nn.Module | None) -> nn.Module | None:
    return None if norm is None else lean_norm(norm)


def _fused(linears: Sequence[nn.Linear | StoredLinear]) -> nn.Linear | StoredLinear:
    """One linear layer with the outputs of several, which remember their part of it as `whole`."""
    sizes = [linear.out_features for linear in linears]
    ends = list(itertools.accumulate(sizes))
    stored = [linear for linear in linears if isinstance(linear, StoredLinear)]
    if len(stored) == len(linears):
        whole: nn.Linear | StoredLinear = StoredLinear.joined(stored)
    else:
        dtype = next(one.weight.dtype for one in linears if isinstance(one, nn.Linear))
        whole = _dense([_ordinary(linear, dtype) for linear in linears], sizes)
    for linear, begin, end in zip(linears, [0, *ends], ends, strict=False):
        vars(linear)["whole"] = (whole, slice(begin, end))  # not as a part of the module
    return whole


def _ordinary(linear: nn.Linear | StoredLinear, dtype: torch.dtype) -> nn.Linear:
    return dense_of(linear, dtype) if isinstance(linear, StoredLinear) else linear


def _dense(linears: Sequence[nn.Linear], sizes: Sequence[int]) -> nn.Linear:
    """As `_fused`, for ordinary layers, whose weights become views of the whole's."""
    first = linears[0]
    whole = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    for name in ("weight", "bias") if first.bias is not None else ("weight",):
        every = torch.cat([getattr(linear, name).data for linear in linears])
        setattr(whole, name, nn.Parameter(every, requires_grad=False))
        for linear, part in zip(linears, torch.split(every, list(sizes)), strict=True):
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
