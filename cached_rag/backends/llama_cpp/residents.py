"""Which prompts are in a llama.cpp context, and in which sequence. Knows buffers; computes nothing.

What is in the context is a copy of what buffers have, so a prompt can be dropped from it at any
time. Where states are kept whole, the context has what the buffer has not: it is taken out before.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch

from cached_rag.backends.llama_cpp.context import LlamaContext
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

Owner = KVBuffer | RowKV


@dataclass(eq=False)
class SequenceState:
    """A sequence's state as a whole; implements `States`.

    While nothing was appended to the sequence, its bytes need not be taken out: an answer makes a
    state a token, of which only the last is wanted.

    Attributes:
        context, sequence: where it is, while it has no `data`.
        length: how many tokens the sequence had read.
        data: (num_bytes,) uint8, in llama.cpp's own form; None while they are in the context only.
    """

    context: LlamaContext
    sequence: int
    length: int
    data: torch.Tensor | None = None

    def packed(self) -> torch.Tensor:
        """See `States`: its bytes, taken out of the context. The caller holds the model's lock."""
        if self.data is None:
            self.data = self.context.state(self.sequence)
        return self.data

    @property
    def nbytes(self) -> int:
        """See `States`."""
        return 0 if self.data is None else self.data.nbytes

    def copy(self) -> SequenceState:
        """See `States`. The bytes are shared, as nobody changes them."""
        return SequenceState(self.context, self.sequence, self.length, self.packed())


@dataclass
class Resident:
    """A prompt in the context.

    Attributes:
        sequence: where it is.
        length: how many of its slots are there, from the first.
    """

    sequence: int
    length: int


class Residents:
    """The prompts in one context, by the buffer that holds them, or by their `RowKV`."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        # In the order of their last use.
        self._found: WeakKeyDictionary[Owner, Resident] = WeakKeyDictionary()
        self._states: dict[int, ref[SequenceState]] = {}

    def add(self, owner: Owner, sequence: int, length: int) -> None:
        """Note that a prompt's first `length` slots are in a sequence."""
        self._found.pop(owner, None)
        self._found[owner] = Resident(sequence, length)

    def state(self, sequence: int, length: int) -> SequenceState:
        """A sequence's state, which is taken out before the sequence is dropped, if it is needed.

        It is asked for anew whenever something was appended.
        """
        found = SequenceState(self._context, sequence, length)
        self._states[sequence] = ref(found)
        return found

    def has(self, sequence: int) -> bool:
        """Whether somebody resides in a sequence."""
        return any(found.sequence == sequence for found in self._found.values())

    def of(self, owner: Owner) -> Resident | None:
        """The resident that has a prompt's KV; None if it is not in the context.

        A prompt is prefilled into a buffer, and then goes on as a row that has it.
        """
        found = self._found.pop(owner, None)
        if found is None and isinstance(owner, RowKV) and not owner.runs:
            found = self._found.pop(owner.own, None)
        if found is not None:
            self.add(owner, found.sequence, found.length)
        return self._found.get(owner)

    def remove(self, owner: Owner) -> None:
        """Drop a prompt's sequence, if it is there."""
        found = self._found.pop(owner, None)
        if found is not None:
            self._drop(found.sequence)

    def sweep(self) -> bool:
        """Drop the sequences that nobody resides in any more; False if there are none."""
        over = self._context.held.keys() - {found.sequence for found in self._found.values()}
        for number in over:
            self._drop(number)
        return bool(over)

    def _drop(self, sequence: int) -> None:
        """Drop a sequence; a state of it that somebody holds is taken out first."""
        self._take_out(sequence)
        self._context.drop(sequence)

    def _take_out(self, sequence: int) -> None:
        held = self._states.pop(sequence, None)
        state = held() if held is not None else None
        if state is not None:
            state.packed()

    def make_room(self) -> bool:
        """Drop what is over, or else the prompt that waits for longest; False if there is none."""
        if self.sweep():
            return True
        oldest = next(self._found.keys(), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest is not None

    def clear(self) -> None:
        """Forget all, as the context will be gone."""
        for sequence in list(self._states):
            self._take_out(sequence)
        self._found.clear()
