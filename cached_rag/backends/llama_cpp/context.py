"""A llama.cpp context: sequences of tokens whose KV is put in, computed, read and dropped.

A context has a fixed number of cells, one for each token's KV, and all sequences share them. It is
made again, larger, when they do not suffice; whoever uses it keeps all KV elsewhere and puts it in
anew. All numbers are checked before llama.cpp sees them.

The bytes in which llama.cpp hands out a sequence's KV and takes it back are read from
`llama_kv_cache::state_write` of the pinned build: two numbers of the format, the number of streams,
the cells (position, number of sequences, sequence), then keys of each layer and values of each
layer, a row a cell, in fp16. Keys are stored rotated. Nothing says so in llama.cpp's interface, so
`StateFormat.of` takes a state apart and puts it together again before it is trusted. Knows tokens
and KV; knows no prompt.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cached_rag.backends.llama_cpp import api
from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes

_F16 = 1  # of `enum ggml_type`
_HEAD, _CELL, _TENSOR = 4 * 4, 3 * 4, 4 + 8  # bytes before the cells, of a cell, before a tensor
_MIDDLE = 4 * 4  # bytes between cells and tensors
# (num_layers, num_kv_heads, num_tokens, dim) keys and values of some tokens.
Part = tuple[torch.Tensor, torch.Tensor]
# Sequences at the same time: running answers, and two that a prefill needs for itself.
MAX_SEQUENCES = 64
# Tokens whose KV goes in or out at once: as a state it is in memory once more meanwhile.
_PIECE = 512
# Tokens that one call of llama.cpp gets.
_BATCH = 2048
# Most logits that a sequence gives in one call: a token and the drafts behind it.
_LOGITS = 16
# Most logits of one call: memory is reserved for them, and a vocabulary has 150,000 entries.
_MOST_LOGITS = 160
_LEAST_CELLS = 1024
# (token, position, sequence, whether its logits are wanted).
_Token = tuple[int, int, int, bool]


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
        keys, at = self._tensors(state, at, count, self.shapes.only.key_dim)
        values, at = self._tensors(state, at, count, self.shapes.only.value_dim)
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
            head = torch.tensor([_F16, 2 * self.shapes.only.heads * width, 0], dtype=torch.int32)
            heads = self._heads(state, at, count, width)
            heads.copy_(head.view(torch.uint8).expand_as(heads))
            target, at = self._tensors(state, at, count, width)
            target.copy_(side.transpose(1, 2))
        return state

    def _heads(self, state: torch.Tensor, at: int, count: int, dim: int) -> torch.Tensor:
        """(num_layers, 12) uint8: what stands before each layer's rows."""
        each = _TENSOR + 2 * count * self.shapes.only.heads * dim
        return state.as_strided((self.shapes.num_layers, _TENSOR), (each, 1), at)

    def _tensors(
        self, state: torch.Tensor, at: int, count: int, dim: int
    ) -> tuple[torch.Tensor, int]:
        """(num_layers, count, num_kv_heads, dim) fp16 view of the rows, and where they end."""
        layers, heads = self.shapes.num_layers, self.shapes.only.heads
        each = _TENSOR + 2 * count * heads * dim
        halves = state[: len(state) // 2 * 2].view(torch.float16)
        strides = (each // 2, heads * dim, dim, 1)
        rows = halves.as_strided((layers, count, heads, dim), strides, (at + _TENSOR) // 2)
        return rows, at + layers * each


@dataclass(frozen=True)
class Work:
    """Tokens to append to a sequence.

    Attributes:
        position: of the first one; it must follow the sequence's last.
        num_logits: after how many of the last ones logits are wanted.
    """

    sequence: int
    token_ids: Sequence[int]
    position: int
    num_logits: int = 1


class FullError(Exception):
    """The context has not so many free cells or sequences.

    Attributes:
        cells: how many it would need in all; 0 if sequences are missing.
    """

    def __init__(self, cells: int = 0) -> None:
        super().__init__(f"{cells} cells are needed")
        self.cells = cells


class LlamaContext:
    """One context of a model.

    Attributes:
        shapes: of the model's KV.
        vocab_size: number of tokens that the model knows.
        size: number of cells.
        format: how states are laid out; None until it was learned.
    """

    def __init__(
        self, library: ctypes.CDLL, model: int, shapes: KVShapes, vocab_size: int, threads: int
    ) -> None:
        """Allocate nothing yet."""
        self._c, self._model, self.shapes = library, model, shapes
        self.vocab_size, self._threads = vocab_size, threads
        self._handle: int | None = None
        self._memory: int | None = None
        self._held: dict[int, int] = {}
        self.size = 0
        self.format: StateFormat | None = None

    @property
    def used(self) -> int:
        """Cells that sequences hold; what one has taken from another counts once."""
        return sum(self._held.values())

    def resize(self, cells: int) -> None:
        """Make the context anew, with at least so many cells; all sequences are gone.

        Raises:
            ModelError: there is no memory for it.
        """
        self.free()
        params = api.default_params(self._c, api.ContextParams)
        size = max(_LEAST_CELLS, -(-cells // 256) * 256)
        params.n_ctx, params.n_batch, params.n_seq_max = size, _BATCH, MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = self._threads
        params.n_outputs_max_per_seq = _LOGITS
        params.n_outputs_max = _MOST_LOGITS
        params.flash_attn_type, params.kv_unified = 1, True
        self._handle = self._c.llama_init_from_model(self._model, params)
        if not self._handle:
            nbytes = size * self.shapes.bytes_per_token
            raise ModelError(
                f"llama.cpp makes no context for the KV of {size} tokens ({nbytes >> 20} MiB); its "
                "messages in the log say why. If memory is short, ask shorter prompts, or fewer at "
                "the same time (BatchConfig.max_rows)"
            )
        self._memory = self._c.llama_get_memory(self._handle)
        self.size = size

    def free(self) -> None:
        """Give its memory back."""
        if self._handle:
            self._c.llama_free(self._handle)
        self._handle, self.size = None, 0
        self._held.clear()

    def require(self, cells: int) -> None:
        """See that there is room.

        Raises:
            FullError: there is not.
        """
        if self.used + cells > self.size:
            raise FullError(self.used + cells)

    def open(self) -> int:
        """An empty sequence.

        Raises:
            FullError: there are too many.
        """
        number = next((n for n in range(MAX_SEQUENCES) if n not in self._held), None)
        if number is None:
            raise FullError
        self._held[number] = 0
        return number

    @contextmanager
    def opened(self) -> Iterator[int]:
        """An empty sequence, which is dropped when the context ends."""
        number = self.open()
        try:
            yield number
        finally:
            self.drop(number)

    def drop(self, sequence: int) -> None:
        """Forget a sequence, if it is there. Cells that others have taken from it stay."""
        if sequence in self._held:
            del self._held[sequence]
            self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def cut(self, sequence: int, begin: int, tokens: int) -> None:
        """Drop the tokens of a sequence from a position on.

        Args:
            tokens: how many they are.
        """
        self._c.llama_memory_seq_rm(self._memory, sequence, begin, -1)
        self._held[sequence] -= tokens

    def take(self, source: int, target: int, begin: int, end: int) -> None:
        """Let a sequence have another one's tokens at positions `begin` to `end` (exclusive)."""
        if begin < end:
            self._c.llama_memory_seq_cp(self._memory, source, target, begin, end)

    def put(
        self, sequence: int, positions: Sequence[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Append KV to a sequence.

        Args:
            positions: of the tokens, ascending, behind the sequence's last.
            keys, values: (num_layers, num_kv_heads, num_tokens, dim) of them.

        Raises:
            FullError: there are too few cells.
            ModelError: llama.cpp refuses it.
        """
        self.require(len(positions))
        for begin in range(0, len(positions), _PIECE):
            piece = slice(begin, begin + _PIECE)
            self._put_piece(sequence, positions[piece], keys[:, :, piece], values[:, :, piece])

    def _put_piece(
        self, sequence: int, positions: Sequence[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """By way of a sequence of its own, as llama.cpp empties the one that it fills."""
        assert self.format is not None
        state = self.format.compose(torch.tensor(positions), keys, values)
        with self.opened() as own:
            read = self._c.llama_state_seq_set_data(self._handle, state.data_ptr(), len(state), own)
            if not read:  # no free cells side by side
                raise FullError(self.used + len(positions))
            if read != len(state):
                raise ModelError(f"llama.cpp took {read} of {len(state)} bytes of a prompt's KV")
            self.take(own, sequence, positions[0], positions[-1] + 1)
        self._held[sequence] += len(positions)

    def state(self, sequence: int, tokens: int | None = None) -> torch.Tensor:
        """(num_bytes,) uint8: a sequence's KV in llama.cpp's own form.

        Args:
            tokens: how many it has; None asks llama.cpp, which takes as long as writing it.
        """
        if tokens is None or self.format is None:
            size = self._c.llama_state_seq_get_size(self._handle, sequence)
        else:
            size = self.format.size(tokens)
        state = torch.empty(size, dtype=torch.uint8)
        wrote = self._c.llama_state_seq_get_data(self._handle, state.data_ptr(), size, sequence)
        if wrote != size:
            raise ModelError(f"llama.cpp wrote {wrote} of the {size} bytes of a sequence's KV")
        return state

    def relabel(self, sequence: int, shift: int) -> None:
        """Raise the positions that a sequence's cells are called by; keys stay as they are rotated.

        llama.cpp appends a token only at the position after the last. Of a cell's position it uses
        nothing but the order, so a gap is left by calling all cells before it by later ones.
        """
        assert self.format is not None
        cells = self.format.parse(self.state(sequence)).sorted()
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._held[sequence] = 0
        self.put(sequence, (cells.positions + shift).tolist(), *cells.part)

    def read(self, sequence: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the KV of the tokens from position `begin` on.

        Args:
            keys, values: (num_layers, num_kv_heads, num_tokens, dim), where to. As many tokens are
                read as they have room for; they stand at positions without gaps.
        """
        assert self.format is not None
        for done in range(0, keys.shape[2], _PIECE):
            some = min(_PIECE, keys.shape[2] - done)
            with self.opened() as part:
                self.take(sequence, part, begin + done, begin + done + some)
                found = self.format.parse(self.state(part, some)).sorted()
            keys[:, :, done : done + some], values[:, :, done : done + some] = found.part

    def compute(self, work: Sequence[Work]) -> torch.Tensor:
        """Append tokens to sequences; (sum of `num_logits`, vocab_size) logits, in their order.

        Raises:
            FullError: there are too few cells.
            ModelError: a token that the model does not know, or llama.cpp cannot compute them.
        """
        tokens = [
            (token, one.position + n, one.sequence, n >= len(one.token_ids) - one.num_logits)
            for one in work
            for n, token in enumerate(one.token_ids)
        ]
        if not all(0 <= token < self.vocab_size for token, *_ in tokens):
            raise ModelError(f"the GGUF file has only {self.vocab_size} tokens: another model's?")
        self.require(len(tokens))
        found = []
        for some in _calls(tokens):
            self._decode(some)
            found += [self._logits(n) for n, (*_, wanted) in enumerate(some) if wanted]
        for one in work:
            self._held[one.sequence] += len(one.token_ids)
        return torch.stack(found) if found else torch.empty(0, self.vocab_size)

    def _decode(self, tokens: Sequence[_Token]) -> None:
        count = len(tokens)
        ids, positions, sequences = (
            np.array([one[part] for one in tokens], dtype=np.int32) for part in range(3)
        )
        wanted = np.array([one[3] for one in tokens], dtype=np.int8)
        ones = np.ones(count, dtype=np.int32)
        places = sequences.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        batch = api.BatchStruct(
            n_tokens=count,
            token=ids.ctypes.data_as(int32),
            pos=positions.ctypes.data_as(int32),
            n_seq_id=ones.ctypes.data_as(int32),
            seq_id=places.ctypes.data_as(ctypes.POINTER(int32)),
            logits=wanted.ctypes.data_as(int8),
        )
        code = self._c.llama_decode(self._handle, batch)
        if code == 1:
            raise FullError(self.size + count)
        if code:
            raise ModelError(f"llama.cpp cannot compute {count} tokens (code {code})")

    def _logits(self, number: int) -> torch.Tensor:
        found = self._c.llama_get_logits_ith(self._handle, number)
        if not found:
            raise ModelError("llama.cpp gave no logits where they were asked for")
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.vocab_size,)).copy())


def _calls(tokens: Sequence[_Token]) -> Iterator[list[_Token]]:
    """The tokens in calls that are no larger than what memory was reserved for."""
    call: list[_Token] = []
    logits: Counter[int] = Counter()
    for token in tokens:
        _, _, sequence, is_wanted = token
        has_room = logits[sequence] < _LOGITS and logits.total() < _MOST_LOGITS
        if len(call) == _BATCH or (is_wanted and not has_room):
            yield call
            call, logits = [], Counter()
        logits[sequence] += is_wanted
        call.append(token)
    yield call
