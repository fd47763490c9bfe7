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

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes, Layered, LayerShape, stacks_of

_F16 = 1  # of `enum ggml_type`
_BEGIN, _HEAD, _CELL = 2 * 4, 2 * 4, 3 * 4  # bytes of a state's and a section's head, and of a cell
_MIDDLE, _TENSOR = 4 * 4, 4 + 8  # between cells and tensors, and before a tensor
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

    def sorted(self) -> Cells:
        """The same by position; copied only if it has another order."""
        order = self.positions.argsort()
        if torch.equal(order, torch.arange(len(order))):
            return self
        return Cells(self.positions[order], self.keys[:, order], self.values[:, order])


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
    middle: tuple[int, int] = (0, 0)

    @property
    def _widths(self) -> tuple[int, ...]:
        """How many numbers a row has, of each of a layer's tensors."""
        one = self.shape
        if self.is_latent:
            return (one.heads * (one.key_dim + one.value_dim),)
        return one.heads * one.key_dim, one.heads * one.value_dim

    def size(self, tokens: int) -> int:
        """Its bytes, with so many tokens."""
        rows = sum(_TENSOR + 2 * tokens * width for width in self._widths)
        return _HEAD + tokens * _CELL + _MIDDLE + self.layers * rows

    def parse(self, state: torch.Tensor) -> Cells:
        """The KV in a section, as views of it, in the order of its cells.

        Args:
            state: (num_bytes,) uint8, the section.
        """
        count = int(state[4:8].view(torch.int32))
        cells = state[_HEAD : _HEAD + count * _CELL].view(torch.int32).view(count, 3)
        keys, values = self._sides(state, count)
        return Cells(cells[:, 0], keys, values)

    def compose(self, state: torch.Tensor, cells: Cells) -> None:
        """Fill a section with some tokens, for whichever sequence takes it."""
        count, end = len(cells.positions), _HEAD + len(cells.positions) * _CELL
        state[:_HEAD].view(torch.int32).copy_(torch.tensor([1, count]))
        rows = state[_HEAD:end].view(torch.int32).view(count, 3)
        rows[:, 0], rows[:, 1], rows[:, 2] = cells.positions, 1, 0
        middle = torch.tensor([0, self.layers, *self.middle])
        state[end : end + _MIDDLE].view(torch.int32).copy_(middle)
        at = end + _MIDDLE
        for width in self._widths:
            head = torch.tensor([_F16, 2 * width, 0], dtype=torch.int32).view(torch.uint8)
            each = _TENSOR + 2 * count * width
            begin = state.storage_offset() + at
            heads = state.as_strided((self.layers, _TENSOR), (each, 1), begin)
            heads.copy_(head.expand_as(heads))
            at += self.layers * each
        for target, side in zip(self._sides(state, count), (cells.keys, cells.values), strict=True):
            target.copy_(side)

    def _sides(self, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values: (num_layers, count, num_kv_heads, dim) fp16."""
        found: list[torch.Tensor] = []
        at = state.storage_offset() + _HEAD + count * _CELL + _MIDDLE
        halves = state.view(torch.float16)
        for width in self._widths:
            each, heads = _TENSOR + 2 * count * width, self.shape.heads
            size = (self.layers, count, heads, width // heads)
            strides = (each // 2, width, width // heads, 1)
            found.append(halves.as_strided(size, strides, (at + _TENSOR) // 2))
            at += self.layers * each
        if self.is_latent:
            (rows,), cut = found, self.shape.key_dim
            return rows[..., :cut], rows[..., cut:]
        return found[0], found[1]


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
    begin: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, state: torch.Tensor, dims: Dims) -> StateFormat:
        """Learn the format from a state that llama.cpp wrote.

        Args:
            state: (num_bytes,) uint8, of at least one token.

        Raises:
            ModelError: the state is not as this module expects it.
        """
        begin = state[:_BEGIN].view(torch.int32).tolist()
        found = cls(tuple(_sections(state, dims)), (begin[0], begin[1]))
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
            found.append(section.parse(state[at:end]))
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
        sides = zip(*(self._of_each_section(side) for side in part), strict=True)
        return self.compose([Cells(at, *(one.transpose(1, 2) for one in both)) for both in sides])

    def take_apart(self, state: torch.Tensor, part: Part) -> None:
        """Copy a state's KV, in the order of its positions, to where keys and values are kept."""
        sides = zip(*(self._of_each_section(side) for side in part), strict=True)
        for cells, (keys, values) in zip(self.parse(state), sides, strict=True):
            some = cells.sorted()
            keys.copy_(some.keys.transpose(1, 2))
            values.copy_(some.values.transpose(1, 2))

    def _of_each_section(self, layered: Layered) -> list[torch.Tensor]:
        """The layers of each section."""
        first, places = 0, self.shapes.places
        found: list[torch.Tensor] = []
        for section in self.sections:
            place = places[first]
            assert place is not None
            stack, at = place
            found.append(stacks_of(layered)[stack][at : at + section.layers])
            first += section.layers
        return found


_UNKNOWN = (
    "they are not laid out as those of plain KV caches in the build that was checked, as with "
    "several position axes"
)


def _sections(state: torch.Tensor, dims: Dims) -> list[Section]:
    """Read how many layers and how wide rows each section has."""
    at = _BEGIN
    found: list[Section] = []
    while at < len(state):
        section = _section(state[at:], dims.heads[min(len(found), 1)], dims.latent)
        at += section.size(int(state[at + 4 : at + 8].view(torch.int32)))
        found.append(section)
    if at != len(state):
        raise ModelError(_UNKNOWN)
    return found


def _section(state: torch.Tensor, head_dim: int, latent: int) -> Section:
    def numbers(at: int, count: int) -> list[int]:
        if at < 0 or at + 4 * count > len(state):
            raise ModelError(_UNKNOWN)
        found: list[int] = state[at : at + 4 * count].clone().view(torch.int32).tolist()
        return found

    streams, count = numbers(0, 2)
    at = _HEAD + count * _CELL
    _, layers, *middle = numbers(at, 4)
    if streams != 1 or count < 1 or layers < 1:
        raise ModelError(_UNKNOWN)
    at += _MIDDLE
    key_row = numbers(at, 2)[1] // 2
    heads = max(1, key_row // head_dim) if head_dim and not latent else 1
    if latent:
        shape = LayerShape(1, key_row - latent, latent)
    else:
        value_row = numbers(at + layers * (_TENSOR + 2 * count * key_row), 2)[1] // 2
        shape = LayerShape(heads, key_row // heads, value_row // heads)
    dims = shape.key_dim, shape.value_dim
    if min(dims) < 1 or any(dim % 2 for dim in dims):
        raise ModelError(_UNKNOWN)
    return Section(layers, shape, bool(latent), (middle[0], middle[1]))
