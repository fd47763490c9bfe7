"""A model's decoder, and what is read off a model without running it: layers, windows, rotation.

These are candidates only: `probe.py` verifies them by running the model. Knows transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from cached_rag.errors import ModelError

# Kinds of rotary scaling whose frequencies change once a sequence is longer than this setting.
_SWITCHING = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "original_max_position_embeddings",
}

# What transformers calls a KV cache: `cache` since 5.24, `past_key_values` before.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def cache_argument(network: Any) -> str:
    """What the forward method calls its KV cache; code that comes with a model may be older."""
    names = inspect.signature(network.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), CACHE)


def frequencies(model: Any) -> list[tuple[float, ...]]:
    """Distinct vectors of inverse frequencies that the model holds or its configuration implies."""
    found = {
        tuple(buffer.double().tolist()): None
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }
    rotary_dim = getattr(model.config, "rotary_dim", None)
    if rotary_dim:
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        found[tuple((10000.0**-steps).tolist())] = None
    return list(found)


def table_rounding(model: Any) -> float:
    """The rounding error of the model's tables of sines if they are in half precision; else 0."""
    tables = [table for table in model.buffers() if table.ndim > 1 and table.is_floating_point()]
    found = (torch.finfo(table.dtype).eps for table in tables if table.dtype != torch.float32)
    return max(found, default=0.0)


def switch(config: Any) -> int | None:
    """The length beyond which rotary frequencies change; None if they never do."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    name = _SWITCHING.get(rope.get("rope_type", ""))
    if name is None:
        return None
    own = rope.get(name) or getattr(text, name, None)
    return int(own or text.max_position_embeddings)


def decoder_layers(model: Any) -> tuple[torch.nn.Module, ...]:
    """The decoder layers: the first module list with as many entries as the model has layers.

    Raises:
        ModelError: there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return tuple(module)
    raise ModelError(f"no list of {count} decoder layers was found in {type(model).__name__}")


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window, None for none; empty if the layer types are unknown here."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        return (window,) * int(text.num_hidden_layers)
    if not set(types) <= {"full_attention", "sliding_attention"}:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class Decoder:
    """What partial prefill needs to know of a model.

    Attributes:
        model: a transformers causal LM in eval mode.
        network: what computes its passes: the model itself, or its lean form (see `lean`).
        layers: the network's decoder layers, in order.
        windows: each layer's sliding window; None for a layer that sees everything.
        is_fast: the model attends through `attention.py`; if not, all tokens enter it
            (see `prefill.py`).
        parameters: names of the arguments of the network's forward method.
        cache_name: which of them is the KV cache.
        keeps_what_it_reads: see `batch.keeps_what_it_reads`.
    """

    model: Any
    network: Any
    layers: tuple[torch.nn.Module, ...]
    windows: tuple[int | None, ...]
    is_fast: bool
    keeps_what_it_reads: bool = True
    parameters: frozenset[str] = field(init=False)
    cache_name: str = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.network.forward).parameters
        object.__setattr__(self, "parameters", frozenset(names))
        object.__setattr__(self, "cache_name", cache_argument(self.network))

    @property
    def own(self) -> Decoder:
        """The same without a lean form: the model computes its passes itself."""
        return replace(self, network=self.model, layers=decoder_layers(self.model))
