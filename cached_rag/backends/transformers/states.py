"""Layers that keep something else than keys and values: recurrent ones, and short convolutions.

A recurrent layer, such as a gated delta net or Mamba 2, has read a prompt's tokens into a state of
fixed size. It cannot be cut back, so what can be kept exactly is the state at one place: a
snapshot, from which any prompt that begins with the same tokens goes on. (`compose.py` puts states
together of parts.) transformers' own cache layers hold the tensors.

A short convolution (LFM2) keeps a token's input, as wide as the model, where an attention layer
keeps keys and values; it does not depend on position. So it is one more thing to store, place and
repair. A row's convolution needs the inputs of the few tokens before it, which may have been
computed in this pass or earlier. Knows transformers; knows no prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from safetensors.torch import save
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_TENSORS = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")
_SIZES = ("conv_kernel_size",)
_CACHES = ("cache", "past_key_values", "cache_params")


class LayerStates:
    """The states of a model's layers at one place of a prompt.

    Attributes:
        layers: transformers' cache layer of each layer; of those without a state nothing is used.
        length: how many tokens they have read.
    """

    def __init__(self, layers: Sequence[Any], length: int = 0) -> None:
        self.layers, self.length = list(layers), length

    @classmethod
    def new(cls, config: Any) -> LayerStates:
        """The states before the first token."""
        return cls(DynamicCache(config=config).layers)

    def copy(self) -> LayerStates:
        """The same, which goes on by itself."""
        return LayerStates([copied_layer(layer) for layer in self.layers], self.length)

    def packed(self) -> torch.Tensor:
        """See `States`: a safetensors file's bytes."""
        return torch.frombuffer(bytearray(save(self.tensors())), dtype=torch.uint8)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it on the CPU, by layer, name and part; flags are numbers."""
        held: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(self.layers):
            for name in (*_TENSORS, *_FLAGS, *_SIZES):
                for part, given in getattr(layer, name, {}).items():
                    if given is not None:
                        tensor = torch.as_tensor(given).detach().cpu().contiguous()
                        held[f"{number}.{name}.{part}"] = tensor
        return held

    @classmethod
    def of(
        cls, config: Any, tensors: Mapping[str, torch.Tensor], length: int, device: torch.device
    ) -> LayerStates:
        """What has these `tensors`, of a model with this configuration."""
        found = cls(DynamicCache(config=config).layers, length)
        for key, tensor in tensors.items():
            number, name, part = key.split(".")
            given: Any = tensor.to(device)
            if name not in _TENSORS:
                given = bool(tensor) if name in _FLAGS else int(tensor)
            getattr(found.layers[int(number)], name)[int(part)] = given
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = (
            tensor
            for layer in self.layers
            for name in _TENSORS
            for tensor in getattr(layer, name, {}).values()
        )
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def copied_layer(layer: Any) -> Any:
    """A cache layer with copies of its states, if it has any."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return layer
    found = copy.copy(layer)
    for name in _TENSORS:
        held: dict[int, torch.Tensor | None] = getattr(layer, name)
        setattr(found, name, {n: None if t is None else t.clone() for n, t in held.items()})
    for name in (*_FLAGS, *_SIZES):
        setattr(found, name, dict(getattr(layer, name)))
    return found


def read_by_token(layers: Iterable[torch.nn.Module]) -> None:
    """Have the mixers of these layers go on behind a state token by token.

    That is for those that transformers lets begin anew where several tokens follow (Jamba's). The
    first tokens of a prompt are read at once, as ever.
    """
    for module in chain.from_iterable(layer.modules() for layer in layers):
        if hasattr(module, DECAY) and not reads_by_token(module):
            module.forward = partial(_by_token, module, module.forward)


def reads_by_token(module: Any) -> bool:
    """Whether it is a mixer that goes on token by token."""
    return getattr(module.forward, "func", None) is _by_token


def _by_token(module: Any, plain: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    cache = _cache_of(options)
    if cache is None or not cache.has_previous_state(module.layer_idx):
        found: torch.Tensor = plain(hidden_states, **options)
        return found
    options["attention_mask"] = None  # nothing is padded here
    tokens = (hidden_states[:, at : at + 1] for at in range(hidden_states.shape[1]))
    return torch.cat([plain(token, **options) for token in tokens], dim=1)


# What modules that keep a state call their decay.
DECAY = "A_log"
# transformers' name for short convolutions.
CONVOLUTION = "conv"


def convolve_rows(layers: Iterable[torch.nn.Module]) -> None:
    """Have the short convolutions of these layers ask our caches for the inputs before a row's own.

    With other caches they do as before. A second call changes nothing.
    """
    for layer in layers:
        module: Any = layer.conv
        plain = type(module).forward
        module.forward = partial(_forward, module, partial(plain, module))


def _cache_of(options: dict[str, Any]) -> Any:
    """The cache among a module's arguments, by its names in transformers' versions; or None."""
    return next((options[name] for name in _CACHES if name in options), None)


def _forward(module: Any, plain: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    cache = _cache_of(options)
    if not hasattr(cache, "preceding"):
        found: torch.Tensor = plain(hidden_states, **options)
        return found
    gate, scale, values = module.in_proj(hidden_states).chunk(3, dim=-1)
    seen = cache.preceding(module.layer_idx, gate * values, module.conv_kernel_size - 1)
    convolved = torch.einsum("brkw,wk->brw", seen, module.conv.weight.squeeze(1))
    if module.conv.bias is not None:
        convolved = convolved + module.conv.bias
    done: torch.Tensor = module.out_proj(scale * convolved)
    return done


def windows_before(kept: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """(batch, num_rows, count + 1, width) inputs of rows and of the tokens before them.

    Args:
        kept: (batch, 1, capacity, width), one a slot.
        slots: (num_rows,) int64, the rows'.
    """
    at = slots[:, None] + torch.arange(-count, 1, device=slots.device)
    found = kept[:, 0, at.clamp(min=0)]
    return found.masked_fill_((at < 0)[None, :, :, None], 0.0)
