"""The bytes in which llama.cpp hands out a sequence's KV and takes it back.

Read from `llama_kv_cache::state_write` of the pinned build: two numbers of the format, the number
of streams, the cells (position, number of sequences, sequence), then keys of each layer and values
of each layer, a row a cell, in fp16. Keys are stored rotated. Nothing says so in llama.cpp's
interface, so `StateFormat.of` takes a state apart and puts it together again before it is trusted.
Knows bytes; knows no library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVShapes

_F16 = 1  # of `enum ggml_type`
_HEAD, _CELL, _TENSOR = 4 * 4, 3 * 4, 4 + 8  # bytes before the cells, of a cell, before a tensor
_MIDDLE = 4 * 4  # bytes between cells and tensors


# (num_layers, num_kv_heads, num_tokens, dim) keys and values of some tokens.
Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Cells:
    """Some tokens' KV.

    Attributes:
        positions: (num_cells,) int32, of each token.
        keys: (num_layers, num_cells, num_kv_heads, head_dim) fp16, rotated for their positions.
        values: (num_layers, num_cells, num_kv_heads, value_dim) fp16.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def part(self) -> Part:
        """Keys and values in this library's order of axes."""
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def sorted(self) -> Cells:
        """The same by position; copied only if it has another order."""
        order = self.positions.argsort()
        if torch.equal(order, torch.arange(len(order))):
            return self
        return Cells(self.positions[order], self.keys[:, order], self.values[:, order])


@dataclass(frozen=True)
class StateFormat:
    """How this build writes this model's states.

    Attributes:
        begin: the state's first two numbers.
        middle: the last two before the tensors.
    """

    shapes: KVShapes
    begin: tuple[int, int]
    middle: tuple[int, int]

    @classmethod
    def of(cls, state: torch.Tensor, shapes: KVShapes, tokens: int) -> StateFormat:
        """Learn the format from a state that llama.cpp wrote.

        Args:
            state: (num_bytes,) uint8.
            tokens: how many tokens it has.

        Raises:
            ModelError: the state is not as this module expects it.
        """
        found = cls(shapes, (0, 0), (0, 0))
        if len(state) != found.size(tokens):
            raise ModelError(
                f"llama.cpp's state of {tokens} tokens has {len(state)} bytes and not "
                f"{found.size(tokens)}: this model has other layers than one plain KV cache each "
                "(sliding windows, recurrent layers), whose state cannot be put together; use "
                'backend="transformers"'
            )
        begin = state[:8].view(torch.int32).tolist()
        at = _HEAD + tokens * _CELL + 8
        middle = state[at : at + 8].view(torch.int32).tolist()
        found = cls(shapes, (begin[0], begin[1]), (middle[0], middle[1]))
        cells = found.parse(state)
        if not torch.equal(found.compose(cells.positions, *cells.part), state):
            raise ModelError(
                "llama.cpp's state is not laid out as in the build that was checked; install "
                "that one (see docs/llama_cpp.md)"
            )
        return found

    def size(self, tokens: int) -> int:
        """Bytes of a state of so many tokens."""
        fixed = _HEAD + _MIDDLE + 2 * self.shapes.num_layers * _TENSOR
        return fixed + tokens * (_CELL + self.shapes.bytes_per_token)

    def parse(self, state: torch.Tensor) -> Cells:
        """The KV in a state, as views of it, in the order of its cells.

        Raises:
            ModelError: it is no state of this format.
        """
        count = int(state[12:16].view(torch.int32)) if len(state) >= _HEAD else 0
        if len(state) != self.size(count):
            raise ModelError(f"a state of {len(state)} bytes cannot have {count} tokens")
        cells = state[_HEAD : _HEAD + count * _CELL].view(torch.int32).view(count, 3)
        at = _HEAD + count * _CELL + _MIDDLE
        keys, at = self._tensors(state, at, count, self.shapes.head_dim)
        values, at = self._tensors(state, at, count, self.shapes.value_dim)
        return Cells(cells[:, 0], keys, values)

    def compose(
        self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """A state with this KV, for whichever sequence takes it.

        Args:
            positions: (num_cells,) of the tokens.
            keys, values: (num_layers, num_kv_heads, num_cells, dim) of them.
        """
        count, layers = len(positions), self.shapes.num_layers
        state = torch.empty(self.size(count), dtype=torch.uint8)
        cells = _HEAD + count * _CELL
        state[:_HEAD].view(torch.int32).copy_(torch.tensor([*self.begin, 1, count]))
        rows = state[_HEAD:cells].view(torch.int32).view(count, 3)
        rows[:, 0], rows[:, 1], rows[:, 2] = positions, 1, 0
        middle = torch.tensor([0, layers, *self.middle])
        state[cells : cells + _MIDDLE].view(torch.int32).copy_(middle)
        at = cells + _MIDDLE
        for side in (keys, values):
            width = side.shape[-1]
            head = torch.tensor([_F16, 2 * self.shapes.num_kv_heads * width, 0], dtype=torch.int32)
            heads = self._heads(state, at, count, width)
            heads.copy_(head.view(torch.uint8).expand_as(heads))
            target, at = self._tensors(state, at, count, width)
            target.copy_(side.transpose(1, 2))
        return state

    def _heads(self, state: torch.Tensor, at: int, count: int, dim: int) -> torch.Tensor:
        """(num_layers, 12) uint8: what stands before each layer's rows."""
        each = _TENSOR + 2 * count * self.shapes.num_kv_heads * dim
        return state.as_strided((self.shapes.num_layers, _TENSOR), (each, 1), at)

    def _tensors(
        self, state: torch.Tensor, at: int, count: int, dim: int
    ) -> tuple[torch.Tensor, int]:
        """(num_layers, count, num_kv_heads, dim) fp16 view of the rows, and where they end."""
        layers, heads = self.shapes.num_layers, self.shapes.num_kv_heads
        each = _TENSOR + 2 * count * heads * dim
        halves = state[: len(state) // 2 * 2].view(torch.float16)
        strides = (each // 2, heads * dim, dim, 1)
        rows = halves.as_strided((layers, count, heads, dim), strides, (at + _TENSOR) // 2)
        return rows, at + layers * each
