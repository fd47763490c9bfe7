"""A llama.cpp context: sequences of tokens whose KV is put in, computed, read and dropped.

A context has a fixed number of cells, one for each token's KV, and all sequences share them. It is
made again, larger, when they do not suffice; whoever uses it keeps all KV elsewhere and puts it in
anew. All numbers are checked before llama.cpp sees them.

Where layers keep something else than KV of each token, such as recurrent ones, a sequence's state
is taken out and put in as a whole, as bytes. Knows tokens and KV; knows no prompt.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.state_format import Part, StateFormat
from cached_rag.backends.llama_cpp.watch import Watch
from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes, LayerShape, stacks_of

# Sequences at the same time: running answers, and those that a prompt is repaired in. Memory for
# what recurrent layers keep is reserved for each.
MAX_SEQUENCES, MAX_RECURRENT = 160, 8
# Tokens whose KV goes in or out at once: as a state it is in memory once more meanwhile.
_PIECE = 512
# Tokens that one call of llama.cpp gets.
_BATCH = 2048
# Most logits that a sequence gives in one call: a token and the drafts behind it.
_LOGITS = 16
# Most logits of one call: memory is reserved for them, and a vocabulary has 150,000 entries. With
# fewer than there may be sequences, llama.cpp ends the process.
_MOST_LOGITS = MAX_SEQUENCES
_LEAST_CELLS = 1024
# (token, position, sequence, whether its logits are wanted).
_Token = tuple[int, int, int, bool]


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


# The KV of a model whose states are kept whole: nothing that has a place in a buffer.
_WHOLE = KVShapes((LayerShape(1, 0, 0),), torch.float16, torch.device("cpu"))


class LlamaContext:
    """One context of a model.

    Attributes:
        vocab_size: number of tokens that the model knows.
        window: how many tokens layers with a sliding window see; 0 if there are none.
        sees_distance: layers use how far tokens are apart otherwise than by rotation.
        max_sequences: how many there may be at the same time.
        least: fewest cells.
        size: number of cells.
        held: of each open sequence, how many cells are its own; those it has taken from others are
            theirs.
        format: how states are laid out; None until it was learned, or if they are kept whole.
        bytes_per_token: of memory, about.
    """

    def __init__(self, library: ctypes.CDLL, model: int, threads: int) -> None:
        """Take over a model's handle, and allocate nothing yet."""
        self._c, self._model = library, model
        vocab = library.llama_model_get_vocab(model)
        self.vocab_size: int = library.llama_vocab_n_tokens(vocab)
        self._threads = threads
        self._handle: int | None = None
        self._memory: int | None = None
        self.held: dict[int, int] = {}
        self.size, self.least, self.bytes_per_token = 0, _LEAST_CELLS, 0
        self.window = library.llama_model_n_swa(model)
        self.sees_distance = bool(self.window)
        self.max_sequences = MAX_RECURRENT if self.is_recurrent else MAX_SEQUENCES
        self.format: StateFormat | None = None
        self.watch = Watch(library)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that has no length."""
        model = self._model
        return bool(self._c.llama_model_is_recurrent(model) or self._c.llama_model_is_hybrid(model))

    @property
    def shapes(self) -> KVShapes:
        """Of the model's KV, as far as it is taken apart."""
        return _WHOLE if self.format is None else self.format.shapes

    @property
    def used(self) -> int:
        """Cells that sequences hold; what one has taken from another counts once."""
        return sum(self.held.values())

    def resize(self, cells: int) -> None:
        """Make the context anew, with at least so many cells; all sequences are gone.

        Raises:
            ModelError: there is no memory for it.
        """
        self.free()
        params = api.default_params(self._c, api.ContextParams)
        size = max(self.least, -(-cells // 256) * 256)
        params.n_ctx, params.n_batch, params.n_seq_max = size, _BATCH, self.max_sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.n_outputs_max_per_seq = _LOGITS
        params.n_outputs_max = _MOST_LOGITS
        params.flash_attn_type, params.kv_unified = 1, True
        params.cb_eval = self.watch.callback
        self._handle = self._c.llama_init_from_model(self._model, params)
        if not self._handle:
            nbytes = size * self.bytes_per_token
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
        self.held.clear()

    def close(self) -> None:
        """Give all memory back, the model's too."""
        self.free()
        self._c.llama_model_free(self._model)

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
        number = next((n for n in range(self.max_sequences) if n not in self.held), None)
        if number is None:
            raise FullError
        self.held[number] = 0
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
        if sequence in self.held:
            del self.held[sequence]
            self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def cut(self, sequence: int, begin: int, tokens: int, end: int = -1) -> None:
        """Drop the tokens of a sequence from a position on.

        Args:
            tokens: how many they are.
            end: the position behind the last of them; -1 for all.
        """
        self._c.llama_memory_seq_rm(self._memory, sequence, begin, end)
        self.held[sequence] -= tokens

    def branch(self, sequence: int, end: int) -> int:
        """A new sequence that has another one's tokens before a position."""
        number = self.open()
        self.take(sequence, number, 0, end)
        return number

    def graft(self, branch: int, sequence: int, begin: int, end: int, replaced: int) -> None:
        """Let a sequence have a branch's tokens at some positions, not its own; drop the branch.

        Args:
            replaced: how many tokens it had there.
        """
        self._c.llama_memory_seq_rm(self._memory, sequence, begin, end)
        self.take(branch, sequence, begin, end)
        self.held[sequence] += end - begin - replaced
        self.drop(branch)

    def take(self, source: int, target: int, begin: int, end: int) -> None:
        """Let a sequence have another one's tokens at positions `begin` to `end` (exclusive)."""
        if begin < end:
            self._c.llama_memory_seq_cp(self._memory, source, target, begin, end)

    def put(self, sequence: int, positions: Sequence[int], part: Part) -> None:
        """Append KV to a sequence.

        Args:
            positions: of the tokens, ascending, behind the sequence's last.
            part: (num_layers, num_kv_heads, num_tokens, dim) keys and values of them.

        Raises:
            FullError: there are too few cells.
            ModelError: llama.cpp refuses it.
        """
        self.require(len(positions))
        for begin in range(0, len(positions), _PIECE):
            some = slice(begin, begin + _PIECE)
            keys, values = (side[:, :, some] for side in part)
            self._put_piece(sequence, positions[some], (keys, values))

    def _put_piece(self, sequence: int, positions: Sequence[int], part: Part) -> None:
        """By way of a sequence of its own, as llama.cpp empties the one that it fills."""
        assert self.format is not None
        with self.opened() as own:
            self.restore(own, self.format.put_together(positions, part), len(positions))
            self.take(own, sequence, positions[0], positions[-1] + 1)
            self.held[own] = 0
        self.held[sequence] += len(positions)

    def restore(self, sequence: int, state: torch.Tensor, tokens: int) -> None:
        """Fill an empty sequence with a state, as `state` gives it or the format puts it together.

        Args:
            tokens: how many it has read.

        Raises:
            FullError: there are too few cells.
            ModelError: llama.cpp refuses it.
        """
        self.require(tokens)
        size = len(state)
        read = self._c.llama_state_seq_set_data(self._handle, state.data_ptr(), size, sequence)
        if not read:  # no free cells side by side
            raise FullError(self.used + tokens)
        if read != size:
            raise ModelError(f"llama.cpp took {read} of {size} bytes of a prompt's KV")
        self.held[sequence] = tokens

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

        Raises:
            ModelError: the model uses the distance, for sliding windows or ALiBi.
        """
        assert self.format is not None
        if self.sees_distance:
            raise ModelError(
                "llama.cpp leaves no gaps between a prompt's positions where layers see the "
                'distance of tokens (sliding windows, ALiBi); use backend="transformers"'
            )
        state = self.state(sequence)
        positions = self.format.parse(state)[0].positions.sort().values + shift
        part = self.shapes.empty(len(positions))
        self.format.take_apart(state, part)
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self.held[sequence] = 0
        self.put(sequence, positions.tolist(), part)

    def read(self, sequence: int, begin: int, part: Part) -> None:
        """Copy the KV of the tokens from position `begin` on.

        Args:
            part: (num_layers, num_kv_heads, num_tokens, dim) keys and values, where to. As many
                tokens are read as they have room for; they stand at positions without gaps.
        """
        assert self.format is not None
        done, count = 0, stacks_of(part[0])[0].shape[2]
        while done < count:
            at = begin + done
            # What a window's last token does not see is left out of a state.
            whole = self.window - at % self.window if self.window else _PIECE
            some = min(_PIECE, whole, count - done)
            keys, values = (side[:, :, done : done + some] for side in part)
            with self.opened() as piece:
                self.take(sequence, piece, at, at + some)
                self.format.take_apart(self.state(piece, some), (keys, values))
            done += some

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
            self.held[one.sequence] += len(one.token_ids)
        return torch.stack(found) if found else torch.empty(0, self.vocab_size)

    def _decode(self, tokens: Sequence[_Token]) -> None:
        count = len(tokens)
        ids, positions, sequences, wanted = np.array(tokens, dtype=np.int32).T.copy()
        has_logits, ones = wanted.astype(np.int8), np.ones(count, dtype=np.int32)
        places = sequences.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        batch = api.BatchStruct(
            n_tokens=count,
            token=ids.ctypes.data_as(int32),
            pos=positions.ctypes.data_as(int32),
            n_seq_id=ones.ctypes.data_as(int32),
            seq_id=places.ctypes.data_as(ctypes.POINTER(int32)),
            logits=has_logits.ctypes.data_as(int8),
        )
        code = self._c.llama_decode(self._handle, batch)
        if code == 1:
            raise FullError(self.size + count)
        if code:
            raise ModelError(f"llama.cpp cannot compute {count} tokens (code {code})")

    def _logits(self, number: int) -> torch.Tensor:
        found = self._c.llama_get_logits_ith(self._handle, number)
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
