"""What can be read off a model without running it: its layers, windows and rotary frequencies.

These are candidates only: `probe.py` verifies them by running the model. Knows transformers.
"""

from __future__ import annotations

import inspect
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
