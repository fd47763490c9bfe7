"""Experiments on a loaded model: cache shapes, which attention works, how keys depend on position.

Every claim is tried on a few tokens before it is used. Knows models; knows no prompt.
"""

from __future__ import annotations

from typing import Any

import torch

from cached_rag.assemble import KVBuffer, KVShapes
from cached_rag.attention import IMPLEMENTATION
from cached_rag.errors import ModelError
from cached_rag.fuse import Decoder, prefill_rows
from cached_rag.relocate import PositionRule, match_rule

_PROBE_TOKENS = 12
_PROBE_DELTA = 61
# Largest error that rounding explains, as a share of the largest value.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Rotary frequencies change with the sequence length in these, beyond the length they name.
_SWITCHING = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "original_max_position_embeddings",
}


def find_decoder(model: Any) -> Decoder:
    """A decoder whose partial prefill was seen to equal the model's own prefill.

    The fast attention is tried first where the family allows attention to be replaced.

    Raises:
        ModelError: neither way reproduces the model.
    """
    layers, windows = _decoder_layers(model), _windows(model.config)
    token_ids = _probe_ids(model)
    with torch.inference_mode():
        plain = model(input_ids=token_ids, use_cache=True).logits[:, -1].float()
    replaceable = getattr(model, "_supports_attention_backend", False) and model._supports_sdpa
    for fast in (True, False) if replaceable and windows else (False,):
        own = model.config._attn_implementation
        if fast:
            model.set_attn_implementation(IMPLEMENTATION)
        decoder = Decoder(model, layers, windows or (None,) * len(layers), fast)
        if _reproduces(decoder, token_ids, plain):
            return decoder
        if fast:
            model.set_attn_implementation(own)
    raise ModelError(
        f"partial prefill does not reproduce {type(model).__name__}'s own prefill: it keeps state "
        "that is not keys and values per token (recurrent layers, shared caches), or needs "
        "per-token inputs that are unknown here. Use a plain decoder-only transformer."
    )


def _reproduces(decoder: Decoder, token_ids: torch.Tensor, plain: torch.Tensor) -> bool:
    """Whether half the rows computed over the other half's KV give the model's own logits."""
    try:
        shapes = kv_shapes(decoder)
        buffer = KVBuffer.like(shapes, token_ids.shape[1])
        prefill_rows(decoder, buffer, token_ids)
        scattered = torch.arange(1, token_ids.shape[1], 2)
        buffer.keys[:, :, :, scattered] = 7.0
        buffer.values[:, :, :, scattered] = 7.0
        logits = prefill_rows(decoder, buffer, token_ids, scattered).logits.float()
    except (ModelError, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    error = float((logits - plain).abs().max())
    return error <= _TOLERANCE[shapes.dtype] * float(plain.abs().max())


def kv_shapes(decoder: Decoder) -> KVShapes:
    """Sizes of the model's keys and values, read off a real cache.

    Raises:
        ModelError: layers differ in shape, or the cache holds something else.
    """
    model = decoder.model
    token_ids = _probe_ids(model)[:, :2]
    with torch.inference_mode():
        cache = model(input_ids=token_ids, use_cache=True).past_key_values
    found = set()
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[1] != values.shape[1]:
            raise ModelError(f"{type(model).__name__} caches more than keys and values per token")
        found.add((keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    if len(found) != 1 or len(cache.layers) != len(decoder.layers):
        raise ModelError(f"the layers of {type(model).__name__} cache tensors of different shapes")
    heads, head_dim, value_dim, dtype, device = found.pop()
    return KVShapes(len(decoder.layers), heads, head_dim, value_dim, dtype, device)


def find_rule(decoder: Decoder, shapes: KVShapes) -> PositionRule:
    """How keys depend on position, from the same tokens at two offsets; never guessed."""
    if "position_ids" not in decoder.parameters:
        # ALiBi families: a bias linear in the key's position, the same for a whole row up to a
        # constant that softmax ignores. Keys and values hold no position at all.
        return match_all(decoder, shapes, 0)
    limit = _switch(decoder.model.config)
    delta = min(_PROBE_DELTA, limit - _PROBE_TOKENS) if limit else _PROBE_DELTA
    return match_all(decoder, shapes, delta)


def match_all(decoder: Decoder, shapes: KVShapes, delta: int) -> PositionRule:
    """One rule a layer; see `find_rule`."""
    token_ids = _probe_ids(decoder.model)
    here, there = KVBuffer.like(shapes, _PROBE_TOKENS), KVBuffer.like(shapes, _PROBE_TOKENS)
    there.lay_out(range(delta, delta + _PROBE_TOKENS))
    prefill_rows(decoder, here, token_ids)
    prefill_rows(decoder, there, token_ids)
    tolerance = _TOLERANCE[shapes.dtype]
    candidates, rules = _frequencies(decoder.model), []
    for layer in range(shapes.num_layers):
        drift = float((here.values[layer] - there.values[layer]).float().abs().max())
        if drift > tolerance * float(there.values[layer].float().abs().max()):
            return PositionRule(
                reason=f"values of layer {layer} change with position (learned positions)"
            )
        keys = here.keys[layer, 0], there.keys[layer, 0]
        rule = match_rule(*keys, delta, candidates, tolerance)
        if rule is None:
            return PositionRule(reason=f"no known rotation explains the keys of layer {layer}")
        rules.append(rule)
    return PositionRule(tuple(rules), limit=_switch(decoder.model.config))


def _frequencies(model: Any) -> list[tuple[float, ...]]:
    """Distinct inverse-frequency vectors that the model's modules hold or its config implies."""
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


def _switch(config: Any) -> int | None:
    """The length beyond which rotary frequencies change, if they do."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    name = _SWITCHING.get(rope.get("rope_type", ""))
    if name is None:
        return None
    own = rope.get(name) or getattr(text, name, None)
    return int(own or text.max_position_embeddings)


def _decoder_layers(model: Any) -> tuple[torch.nn.Module, ...]:
    """The decoder layers: the module list that has as many entries as the model has layers."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return tuple(module)
    raise ModelError(f"no list of {count} decoder layers was found in {type(model).__name__}")


def _windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window; empty where the configuration is not understood."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        return (window,) * int(text.num_hidden_layers)
    if not set(types) <= {"full_attention", "sliding_attention"}:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _probe_ids(model: Any) -> torch.Tensor:
    """(1, _PROBE_TOKENS) distinct-ish token ids that every vocabulary has."""
    size = model.config.get_text_config().vocab_size
    ids = [(37 * i + 11) % size for i in range(_PROBE_TOKENS)]
    return torch.tensor([ids], device=next(model.parameters()).device)
