"""Which prompts' KV lies in a llama.cpp context just now, and up to where.

The engine keeps all KV in buffers of its own; what is in the context is a copy. So a prompt can
leave the context at any time, and is put in anew when it goes on. Knows who is there; puts in
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from cached_rag.backends.llama_cpp.context import LlamaContext
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

Owner = KVBuffer | RowKV


@dataclass
class Resident:
    """A prompt in the context.

    Attributes:
        sequence: where it is.
        length: how many of its slots are there, from the first.
        used: when it was used last, as a count of uses.
    """

    sequence: int
    length: int
    used: int


class Residents:
    """The prompts in one context, by the buffer that holds them, or by their `RowKV`."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._found: WeakKeyDictionary[Owner, Resident] = WeakKeyDictionary()
        self._sequences: dict[int, ref[Owner]] = {}
        self._uses = 0

    def add(self, owner: Owner, sequence: int, length: int) -> None:
        """Note that a prompt's first `length` slots are in a sequence."""
        self._uses += 1
        self._found[owner] = Resident(sequence, length, self._uses)
        self._sequences[sequence] = ref(owner)

    def has(self, sequence: int) -> bool:
        """Whether somebody resides in a sequence."""
        return sequence in self._sequences

    def of(self, kv: RowKV) -> Resident | None:
        """The resident that has a row's KV; None if it is not in the context.

        A prompt is prefilled into a buffer, and then goes on as a row that has it.
        """
        found = self._found.get(kv)
        if found is None and not kv.runs and (found := self._found.pop(kv.own, None)) is not None:
            self._found[kv] = found
            self._sequences[found.sequence] = ref(kv)
        if found is not None:
            self._uses += 1
            found.used = self._uses
        return found

    def remove(self, owner: Owner) -> None:
        """Drop a prompt's sequence, if it is there."""
        found = self._found.pop(owner, None)
        if found is not None:
            self._sequences.pop(found.sequence)
            self._context.drop(found.sequence)

    def sweep(self) -> bool:
        """Drop the sequences of prompts that are over; False if there are none."""
        over = [number for number, owner in self._sequences.items() if owner() is None]
        for number in over:
            del self._sequences[number]
            self._context.drop(number)
        return bool(over)

    def make_room(self) -> bool:
        """Drop what is over, or else the prompt that waits for longest; False if there is none."""
        if self.sweep():
            return True
        found = [(one.used, owner) for owner, one in self._found.items()]
        if not found:
            return False
        self.remove(min(found, key=lambda pair: pair[0])[1])
        return True

    def clear(self) -> None:
        """Forget all, as the context is gone."""
        self._found.clear()
        self._sequences.clear()
