"""The bytes in which llama.cpp hands out a sequence's KV, and takes it back.

They are read from `llama_kv_cache::state_write` of the pinned build: two numbers of the format, and
then a section for each of the model's caches. Most models have one; layers with a sliding window
have a second one. A section has the number of streams, the cells (position, number of sequences,
sequence), two flags and two further numbers, then keys of each layer and values of each layer, a
row a cell, in fp16. Keys are stored rotated. Latent attention has keys only: a row is the latent,
and behind it the part that is rotated.

Nothing says so in llama.cpp's interface, so `StateFormat.of` takes a state apart and puts it
together again before it is trusted. Knows bytes and KV; knows no context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes, Layered, LayerShape, stacks_of

_F16 = 1  # of `enum ggml_type`
_BEGIN = 2 * 4  # bytes of a state's first two numbers
_HEAD = np.dtype([("streams", "<i4"), ("cells", "<i4")])
_CELL = np.dtype([("position", "<i4"), ("sequences", "<i4"), ("sequence", "<i4")])
_MIDDLE = np.dtype([("flag", "<i4"), ("layers", "<i4"), ("more", "<i4", 2)])
Array = np.ndarray[Any, Any]
# (num_layers, num_kv_heads, num_tokens, dim) keys and values of some tokens.
Part = tuple[Layered, Layered]


@dataclass(frozen=True)
class Cells:
    """Some tokens' KV in the layers of a section.

    Attributes:
        positions: (num_cells,) int32, of each token.
        keys: (num_layers, num_cells, num_kv_heads, key_dim) fp16, rotated for their positions.
        values: (num_layers, num_cells, num_kv_heads, value_dim) fp16.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Section:
    """One of the model's caches: layers that are alike.

    Attributes:
        layers: how many they are.
        shape: what each keeps of a token.
        is_latent: values stand behind the keys in the same rows.
        middle: two numbers before the tensors.
    """

    layers: int
    shape: LayerShape
    is_latent: bool = False
    middle: tuple[int, ...] = (0, 0)

    def _layout(self, tokens: int) -> list[tuple[int, np.dtype[Any]]]:
        """Its parts, with so many tokens: how many there are of each, and what one is."""
        one = self.shape
        dims = [one.key_dim + one.value_dim] if self.is_latent else [one.key_dim, one.value_dim]
        tensors = [(self.layers, _tensor(tokens, one.heads, dim)) for dim in dims]
        return [(1, _HEAD), (tokens, _CELL), (1, _MIDDLE), *tensors]

    def size(self, tokens: int) -> int:
        """Its bytes, with so many tokens."""
        return sum(count * part.itemsize for count, part in self._layout(tokens))

    def _views(self, state: torch.Tensor, tokens: int) -> list[Array]:
        """Views of its parts."""
        at, found = 0, []
        for count, part in self._layout(tokens):
            found.append(np.ndarray(count, part, state.numpy(), at))
            at += count * part.itemsize
        return found

    def parse(self, state: torch.Tensor, tokens: int) -> Cells:
        """The KV in a section, as views of it, in the order of its cells.

        Args:
            state: (num_bytes,) uint8, the section.
        """
        _, cells, _, *tensors = self._views(state, tokens)
        return Cells(torch.from_numpy(cells["position"]), *self._sides(tensors))

    def compose(self, state: torch.Tensor, cells: Cells) -> None:
        """Fill a section with some tokens, for whichever sequence takes it."""
        count = len(cells.positions)
        head, rows, middle, *tensors = self._views(state, count)
        head[0] = 1, count
        rows["position"], rows["sequences"], rows["sequence"] = cells.positions.numpy(), 1, 0
        middle[0] = 0, self.layers, self.middle
        for tensor in tensors:
            tensor["kind"], tensor["row_bytes"] = _F16, tensor["rows"][0, 0].nbytes
        for target, side in zip(self._sides(tensors), (cells.keys, cells.values), strict=True):
            target.copy_(side)

    def _sides(self, tensors: Sequence[Array]) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values: (num_layers, count, num_kv_heads, dim) fp16."""
        rows = [torch.from_numpy(tensor["rows"]) for tensor in tensors]
        if self.is_latent:
            return rows[0][..., : self.shape.key_dim], rows[0][..., self.shape.key_dim :]
        return rows[0], rows[1]


def _tensor(tokens: int, heads: int, dim: int) -> np.dtype[Any]:
    """One layer's keys or values."""
    rows = ("rows", "<f2", (tokens, heads, dim))
    return np.dtype([("kind", "<i4"), ("row_bytes", "<u8"), rows])


@dataclass(frozen=True)
class Dims:
    """What a state does not say of the rows in it.

    Attributes:
        heads: sizes of a key's head: of the first section, and of the second; 0 for as wide as the
            row.
        latent: of latent attention, how many of a row's last numbers are rotated; else 0.
    """

    heads: tuple[int, int]
    latent: int = 0


@dataclass(frozen=True)
class StateFormat:
    """How this build writes this model's states.

    Attributes:
        sections: one for each of its caches. The model's layers are counted section by section.
        begin: the state's first two numbers.
    """

    sections: tuple[Section, ...]
    begin: tuple[int, ...] = (0, 0)

    @classmethod
    def of(cls, state: torch.Tensor, dims: Dims) -> StateFormat:
        """Learn the format from a state that llama.cpp wrote.

        Args:
            state: (num_bytes,) uint8, of at least one token.

        Raises:
            ModelError: the state is not as this module expects it.
        """
        try:
            found = cls(tuple(_sections(state.numpy(), dims)), _numbers(state.numpy(), 0, 2))
        except ValueError as error:  # it is shorter than it says
            raise ModelError(_UNKNOWN) from error
        if not torch.equal(found.compose(found.parse(state)), state):
            raise ModelError(_UNKNOWN)
        return found

    @property
    def shapes(self) -> KVShapes:
        """Sizes of the layers' KV."""
        layers = [one.shape for one in self.sections for _ in range(one.layers)]
        return KVShapes(tuple(layers), torch.float16, torch.device("cpu"))

    def size(self, tokens: int) -> int:
        """Bytes of a state that has so many tokens in each section."""
        return _BEGIN + sum(section.size(tokens) for section in self.sections)

    def parse(self, state: torch.Tensor) -> list[Cells]:
        """The KV in a state, as views of it, of each section.

        Raises:
            ModelError: it is no state of this format.
        """
        at, found = _BEGIN, []
        for section in self.sections:
            count = int(state[at + 4 : at + 8].view(torch.int32)) if len(state) >= at + 8 else 0
            end = at + section.size(count)
            if not count or end > len(state):
                raise ModelError(f"a state of {len(state)} bytes cannot have {count} tokens")
            found.append(section.parse(state[at:end], count))
            at = end
        if at != len(state):
            raise ModelError(f"a state has {len(state)} bytes, and {at} were expected")
        return found

    def compose(self, cells: Sequence[Cells]) -> torch.Tensor:
        """A state with these tokens of each section, for whichever sequence takes it."""
        parts = list(zip(self.sections, cells, strict=True))
        sizes = [section.size(len(some.positions)) for section, some in parts]
        state = torch.empty(_BEGIN + sum(sizes), dtype=torch.uint8)
        state[:_BEGIN].view(torch.int32).copy_(torch.tensor(self.begin))
        at = _BEGIN
        for (section, some), size in zip(parts, sizes, strict=True):
            section.compose(state[at : at + size], some)
            at += size
        return state

    def put_together(self, positions: Sequence[int], part: Part) -> torch.Tensor:
        """A state with the same tokens in all sections.

        Args:
            positions: of the tokens.
            part: (num_layers, num_kv_heads, num_tokens, dim) keys and values.
        """
        at = torch.tensor(positions)
        return self.compose([Cells(at, *sides) for sides in self._by_section(part)])

    def take_apart(self, state: torch.Tensor, part: Part) -> None:
        """Copy a state's KV, in the order of its positions, to where keys and values are kept."""
        for cells, (keys, values) in zip(self.parse(state), self._by_section(part), strict=True):
            order: torch.Tensor | slice = cells.positions.argsort()
            if torch.equal(cells.positions, cells.positions[order]):
                order = slice(None)  # as it mostly is: then nothing is copied twice
            keys.copy_(cells.keys[:, order])
            values.copy_(cells.values[:, order])

    def _by_section(self, part: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of each section's keys and values, as `Cells` has them."""
        first = 0
        for section in self.sections:
            place = self.shapes.places[first]
            assert place is not None
            stack, at = place
            keys, values = (stacks_of(side)[stack][at : at + section.layers] for side in part)
            yield keys.transpose(1, 2), values.transpose(1, 2)
            first += section.layers


_UNKNOWN = (
    "they are not laid out as those of plain KV caches in the build that was checked, as with "
    "several position axes"
)


def _sections(state: Array, dims: Dims) -> list[Section]:
    """Read how many layers and how wide rows each section has."""
    at, found = _BEGIN, list[Section]()
    while at < len(state):
        section, count = _section(state, at, dims.heads[min(len(found), 1)], dims.latent)
        found.append(section)
        at += section.size(count)
    if at != len(state):
        raise ModelError(_UNKNOWN)
    return found


def _section(state: Array, at: int, head_dim: int, latent: int) -> tuple[Section, int]:
    """The section that begins at a byte, and its number of tokens."""
    streams, count = _numbers(state, at, 2)
    at += _HEAD.itemsize + count * _CELL.itemsize
    _, layers, *middle = _numbers(state, at, 4)
    if streams != 1 or count < 1 or layers < 1:
        raise ModelError(_UNKNOWN)
    at += _MIDDLE.itemsize
    key_row = _numbers(state, at, 2)[1] // 2
    heads = max(1, key_row // head_dim) if head_dim and not latent else 1
    if latent:
        shape = LayerShape(1, key_row - latent, latent)
    else:
        at += layers * _tensor(count, 1, key_row).itemsize
        value_row = _numbers(state, at, 2)[1] // 2
        shape = LayerShape(heads, key_row // heads, value_row // heads)
    dims = shape.key_dim, shape.value_dim
    if min(dims) < 1 or any(dim % 2 for dim in dims):
        raise ModelError(_UNKNOWN)
    return Section(layers, shape, bool(latent), tuple(middle)), count


def _numbers(state: Array, at: int, count: int) -> tuple[int, ...]:
    """Numbers of 4 bytes; raises a ValueError where there are not so many."""
    return tuple(np.frombuffer(state, "<i4", count, at).tolist())
