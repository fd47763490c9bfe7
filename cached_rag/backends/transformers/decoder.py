"""A model's decoder and its layers: of what kind each is, what KV it keeps, how it attends.

Another kind of layer is described here. What is read off a model is a candidate only: `probe.py`
verifies it by running the model. Knows transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from cached_rag.backends.transformers import states
from cached_rag.backends.transformers.kernels import Chunks
from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes, LayerShape

# Kinds of rotary scaling whose frequencies change once a sequence is longer than what follows.
_SWITCHING, _ORIGINAL = ("longrope", "dynamic"), "original_max_position_embeddings"
# Kinds of layers whose attention this library can compute, by transformers' names for them.
_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
REMEDY = "Use a plain decoder-only transformer."
# What transformers calls a KV cache: `cache` since 5.24, `past_key_values` before.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass(frozen=True)
class DecoderLayer:
    """One layer of a decoder.

    Attributes:
        module: what computes it.
        kind: transformers' name for what it does.
        window: how many tokens it sees, the last one included, or `Chunks`; None for all.
        shape: what it keeps of a token; None for nothing of its own, as it reads another layer's.
        is_stateful: it keeps a state, too, which has no length (see `states.py`).
    """

    module: torch.nn.Module
    kind: str
    window: int | None
    shape: LayerShape | None
    is_stateful: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has attention that this library can compute."""
        return self.kind in (_FULL, _SLIDING, _CHUNKED)

    @property
    def is_known(self) -> bool:
        """Whether this library can compute it for scattered rows; else the model itself must."""
        return (self.attends or self.kind == states.CONVOLUTION) and not self.is_stateful


def decoder_layers(
    model: Any, shapes: KVShapes | None = None, stateful: Collection[int] = ()
) -> tuple[DecoderLayer, ...]:
    """A model's layers, in order, as its configuration describes them.

    Args:
        shapes: what they keep, if that is known.
        stateful: which of them keep a state.

    Raises:
        ModelError: as `decoder_modules`.
    """
    text, modules = model.config.get_text_config(), decoder_modules(model)
    window: int | None = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    windows = {_SLIDING: window, _CHUNKED: Chunks(chunk) if chunk else None}
    kinds = getattr(text, "layer_types", None) or [_SLIDING if window else _FULL] * len(modules)
    kept = shapes.layers if shapes else (None,) * len(modules)
    return tuple(
        DecoderLayer(module, kind, windows.get(kind), shape, index in stateful)
        for index, (module, kind, shape) in enumerate(zip(modules, kinds, kept, strict=True))
    )


def decoder_modules(model: Any) -> tuple[torch.nn.Module, ...]:
    """The decoder layers: the first module list with as many entries as the model has layers.

    What sees images may have as many; so what the model calls its decoder is searched first.

    Raises:
        ModelError: there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in chain(model.get_decoder().modules(), model.modules()):
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return tuple(module)
    raise ModelError(f"no list of {count} decoder layers was found in {type(model).__name__}")


def frequencies(model: Any) -> list[tuple[float, ...]]:
    """Distinct vectors of inverse frequencies that the model holds or its configuration implies."""
    found = {
        tuple(buffer.cpu().double().tolist()): None
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


def rotations(config: Any) -> list[dict[str, Any]]:
    """Parameters of a model's rotary embeddings; several if kinds of layers have their own."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [own for own in rope.values() if isinstance(own, dict)] or [rope]


def switch(config: Any) -> int | None:
    """The length beyond which rotary frequencies change, of any layer; None if they never do."""
    text = config.get_text_config()
    switching = (rope for rope in rotations(text) if rope.get("rope_type") in _SWITCHING)
    lengths = (
        rope.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or text.max_position_embeddings
        for rope in switching
    )
    return min(map(int, lengths), default=None)


def forget_lengths(model: Any) -> None:
    """Have dynamic NTK rotate by each pass's own length, not by the longest one's until then."""
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")):
            module.register_forward_pre_hook(_forget_lengths)


def _forget_lengths(rotary: torch.nn.Module, _: Any) -> None:
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, 0)  # any length is new then


def cache_argument(network: Any) -> str:
    """What the forward method calls its KV cache; code that comes with a model may be older."""
    names = inspect.signature(network.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), CACHE)


@dataclass(frozen=True)
class Decoder:
    """What partial prefill needs to know of a model.

    Attributes:
        model: a transformers causal LM in eval mode.
        network: what computes its passes: the model itself, or its lean form (see `lean`).
        layers: the network's decoder layers, in order.
        is_fast: the model attends through `attention.py`; if not, all tokens enter it
            (see `prefill.py`).
        keeps_what_it_reads: see `batch.keeps_what_it_reads`.
    """

    model: Any
    network: Any
    layers: tuple[DecoderLayer, ...]
    is_fast: bool
    keeps_what_it_reads: bool = True

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the arguments of the network's forward method."""
        return frozenset(inspect.signature(self.network.forward).parameters)

    @cached_property
    def cache_name(self) -> str:
        """Which of them is the KV cache."""
        return cache_argument(self.network)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """What computes each layer."""
        return tuple(layer.module for layer in self.layers)

    @property
    def num_keeping(self) -> int:
        """How many layers there are up to the last one that keeps something of its own."""
        kept = (i for i, one in enumerate(self.layers, 1) if one.shape or one.is_stateful)
        return max(kept)

    @property
    def keeps_states(self) -> bool:
        """Whether any layer keeps a state."""
        return any(layer.is_stateful for layer in self.layers)

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that have attention."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attends)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window; None for a layer that sees everything."""
        return tuple(layer.window for layer in self.layers)

    def inputs(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        kept: int | torch.Tensor | None,
    ) -> dict[str, Any]:
        """A pass's arguments, as far as the network takes them.

        Args:
            token_ids, positions: (batch, num_rows) int64.
            kept: how many of the last rows get logits, or which rows do; None for no logits.
        """
        # Not asked for a cache, but given ours: MiniMax would insist on a class of its own.
        given = {"input_ids": token_ids, "position_ids": positions, "use_cache": False}
        if kept is not None:
            given["logits_to_keep"] = kept
        known = {name: value for name, value in given.items() if name in self.parameters}
        return known | {self.cache_name: cache}

    def computed_by(self, network: Any) -> Decoder:
        """The same with another network: a lean form, or the model itself."""
        modules = decoder_modules(self.model) if network is self.model else network.layers
        layers = zip(self.layers, modules, strict=True)
        replaced = tuple(replace(layer, module=module) for layer, module in layers)
        return replace(self, network=network, layers=replaced)
