"""What a model's layers keep of a token, and tensors that have an entry for each layer.

Layers need not be alike: they may differ in their heads (Gemma 4), keep something else than keys
and values, or read another layer's. Knows sizes; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, overload

import torch


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: keys (heads, key_dim) and values (heads, value_dim).

    A short convolution has no keys (key_dim 0), and as values its inputs. Latent attention has one
    head, whose keys are the latent, and whose values are the part that is rotated.
    """

    heads: int
    key_dim: int
    value_dim: int


class Ragged:
    """A tensor for each layer, where layers differ; those of equal layers are views of one stack.

    It is indexed as one tensor of all layers would be: with a layer's number, or with a tuple that
    begins with `:` for all of them. A layer that keeps nothing has no tensor.

    Attributes:
        stacks: (number of its layers, ...) each, alike in all but the first and the last dimension.
        places: of each layer the stack and the index in it; None if it keeps nothing.
    """

    def __init__(
        self, stacks: Sequence[torch.Tensor], places: Sequence[tuple[int, int] | None]
    ) -> None:
        self.stacks, self.places = tuple(stacks), tuple(places)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: tuple[Any, ...]) -> Ragged: ...
    def __getitem__(self, index: int | tuple[Any, ...]) -> torch.Tensor | Ragged:
        if isinstance(index, tuple):
            if index[0] != slice(None):
                raise IndexError("layers that differ are indexed one by one, or all of them")
            return self.each(lambda stack: stack[index])
        place = self.places[index]
        if place is None:
            raise IndexError(f"layer {index} keeps nothing of its own")
        return self.stacks[place[0]][place[1]]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
        """The same of changed stacks."""
        return Ragged([change(stack) for stack in self.stacks], self.places)

    def to(self, *args: Any, **options: Any) -> Ragged:
        """As a tensor's."""
        return self.each(lambda stack: stack.to(*args, **options))

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Ragged:
        """As a tensor's."""
        return self.each(lambda stack: stack.clone(memory_format=memory_format))

    def zero_(self) -> Ragged:
        """As a tensor's."""
        return self.each(torch.Tensor.zero_)

    @property
    def dtype(self) -> torch.dtype:
        """Of all."""
        return self.stacks[0].dtype

    @property
    def device(self) -> torch.device:
        """Of all."""
        return self.stacks[0].device

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return sum(stack.nbytes for stack in self.stacks)


# Of a model whose layers are alike one tensor, whose first dimension is the layer.
Layered: TypeAlias = torch.Tensor | Ragged


def stacks_of(layered: Layered) -> tuple[torch.Tensor, ...]:
    """The tensors that hold all layers."""
    return layered.stacks if isinstance(layered, Ragged) else (layered,)


def layers_in(layered: Layered, stack: int) -> Sequence[int]:
    """The numbers of the layers that are in a stack, in order."""
    if not isinstance(layered, Ragged):
        return range(len(layered))
    return [layer for layer, at in enumerate(layered.places) if at and at[0] == stack]


def each(layered: Layered, change: Callable[[torch.Tensor], torch.Tensor]) -> Layered:
    """The same of changed stacks."""
    return layered.each(change) if isinstance(layered, Ragged) else change(layered)


def by_layer(layered: Layered) -> Sequence[torch.Tensor] | Ragged:
    """Something that gives each layer's tensor by its number, quickly."""
    return layered if isinstance(layered, Ragged) else layered.unbind(0)


def holds(layered: Layered, layer: int) -> bool:
    """Whether a layer keeps anything of its own."""
    return not isinstance(layered, Ragged) or layered.places[layer] is not None


@dataclass(frozen=True)
class KVShapes:
    """What a model keeps of each token, where and in which dtype.

    Attributes:
        layers: of each layer what it keeps; None for nothing of its own.
    """

    layers: tuple[LayerShape | None, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.layers)

    @property
    def first_attending(self) -> int:
        """The first layer that has keys; before it are short convolutions at most (LFM2)."""
        return next((at for at, shape in enumerate(self.layers) if shape and shape.key_dim), 0)

    @cached_property
    def kinds(self) -> tuple[LayerShape, ...]:
        """The different shapes among them, in their order."""
        return tuple(dict.fromkeys(shape for shape in self.layers if shape is not None))

    @cached_property
    def places(self) -> tuple[tuple[int, int] | None, ...]:
        """See `Ragged`."""
        counts = dict.fromkeys(self.kinds, 0)
        found: list[tuple[int, int] | None] = []
        for shape in self.layers:
            found.append(None if shape is None else (self.kinds.index(shape), counts[shape]))
            if shape is not None:
                counts[shape] += 1
        return tuple(found)

    @property
    def is_even(self) -> bool:
        """Whether all layers are alike."""
        return len(self.kinds) == 1 and None not in self.layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = (one.heads * (one.key_dim + one.value_dim) for one in self.layers if one)
        return sum(numbers) * self.dtype.itemsize

    def empty(self, *size: int) -> tuple[Layered, Layered]:
        """Uninitialised keys and values.

        Args:
            size: of what stands before the heads, if anything, and the number of tokens.

        Returns:
            (num_layers, *before, heads, tokens, dim) each.
        """
        *before, tokens = size

        def stack(shape: LayerShape, dim: int) -> torch.Tensor:
            sizes = (self.layers.count(shape), *before, shape.heads, tokens, dim)
            return torch.empty(sizes, dtype=self.dtype, device=self.device)

        keys = [stack(shape, shape.key_dim) for shape in self.kinds]
        return self.join(keys), self.join([stack(shape, shape.value_dim) for shape in self.kinds])

    def join(self, stacks: Sequence[torch.Tensor]) -> Layered:
        """The stacks of all kinds as one."""
        return stacks[0] if self.is_even else Ragged(stacks, self.places)

    def fits(self, keys: Layered, values: Layered, tokens: int) -> bool:
        """Whether (num_layers, heads, tokens, dim) keys and values are what the model keeps."""
        wanted = replace(self, device=torch.device("meta")).empty(tokens)
        return (_form(keys), _form(values)) == (_form(wanted[0]), _form(wanted[1]))


def _form(layered: Layered) -> tuple[object, ...]:
    """What all tensors of the same kinds of layers and the same size have in common."""
    places = layered.places if isinstance(layered, Ragged) else None
    return places, layered.dtype, [stack.shape for stack in stacks_of(layered)]
