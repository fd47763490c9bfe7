"""States of layers that have no length: recurrent layers, such as gated delta nets and Mamba 2.

Such a layer has read a prompt's tokens into a state of fixed size. It cannot be cut back, moved or
put together of parts (in general), so what can be kept is the state at one place, exactly: a
snapshot, from which any prompt that begins with the same tokens goes on. transformers' own cache
layers hold the tensors. Knows transformers; knows no prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_TENSORS = ("conv_states", "recurrent_states")
_FLAGS = (
    *("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"),
    "conv_kernel_size",
)


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
        return LayerStates([_copied(layer) for layer in self.layers], self.length)

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


def _copied(layer: Any) -> Any:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return layer
    found = copy.copy(layer)
    for name in _TENSORS:
        held: dict[int, torch.Tensor | None] = getattr(layer, name)
        setattr(found, name, {n: None if t is None else t.clone() for n, t in held.items()})
    for name in _FLAGS:
        setattr(found, name, dict(getattr(layer, name)))
    return found
