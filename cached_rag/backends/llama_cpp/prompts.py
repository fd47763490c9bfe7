"""Prompts in a llama.cpp context: how one is put together there, and which ones are there just now.

llama.cpp appends tokens to sequences and does nothing else. So a prompt is put together from its
first token to its last, run by run: KV from the buffer up to the next gap, the gap's tokens
computed, and so on. Each computed token then sees exactly what stands before it.

The engine keeps all KV in buffers of its own; what is in the context is a copy. So a prompt can
leave the context at any time, and is put in anew when it goes on. Knows slots and positions; knows
no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch

from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.state import Part
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

Run = tuple[int, int]  # begin and end (exclusive) of neighbouring slots
Owner = KVBuffer | RowKV


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch, and which of its tokens are computed.

    Attributes:
        buffer: has the KV of the others, and gets that of the computed ones.
        row: which prompt of the buffer it is.
        ids: of all its tokens.
        slots: of the tokens to compute, ascending. What follows the last of them is left out.
    """

    buffer: KVBuffer
    row: int
    ids: Sequence[int]
    slots: Sequence[int]

    @property
    def length(self) -> int:
        """How many slots it has in the sequence in the end."""
        return self.slots[-1] + 1

    def compose(self, context: LlamaContext, sequence: int, num_logits: int) -> torch.Tensor:
        """Fill an empty sequence, and write the KV of the computed tokens to the buffer.

        Returns:
            (num_logits, vocab_size) logits of the last tokens.

        Raises:
            FullError: the context has too few free cells.
        """
        context.require(self.length)
        positions = [self.buffer.position(slot) for slot in range(self.length)]
        done, left, found = 0, len(self.slots), []
        for begin, end in neighbours(self.slots, positions):
            if done < begin:
                keys, values = self._room(done, begin)
                context.put(sequence, positions[done:begin], keys, values)
            if begin and (gap := positions[begin] - positions[begin - 1] - 1):
                context.relabel(sequence, gap)
            left -= end - begin
            wanted = min(end - begin, max(0, num_logits - left))
            work = Work(sequence, self.ids[begin:end], positions[begin], wanted)
            found.append(context.compute([work]))
            context.read(sequence, positions[begin], *self._room(begin, end))
            done = end
        return torch.cat(found)

    def _room(self, begin: int, end: int) -> Part:
        """Views of some slots' keys and values."""
        keys, values = self.buffer.keys[:, self.row], self.buffer.values[:, self.row]
        return keys[:, :, begin:end], values[:, :, begin:end]


def neighbours(slots: Sequence[int], positions: Sequence[int]) -> list[Run]:
    """Ascending slots as runs without gaps, neither of slots nor of positions.

    Args:
        positions: of all slots, from the first.
    """
    runs: list[Run] = []
    for slot in slots:
        follows = bool(runs) and runs[-1][1] == slot and positions[slot] == positions[slot - 1] + 1
        runs[-1:] = [(runs[-1][0], slot + 1)] if follows else [*runs[-1:], (slot, slot + 1)]
    return runs


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
