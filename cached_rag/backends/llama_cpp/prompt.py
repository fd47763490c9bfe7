"""Puts one prompt together in a llama.cpp sequence: known KV goes in, the rest is computed.

llama.cpp appends tokens to sequences and does nothing else. So a prompt is put together from its
first token to its last, run by run: KV from the buffer up to the next gap, the gap's tokens
computed, and so on. Each computed token then sees exactly what stands before it. Knows slots and
positions; knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.state import Part
from cached_rag.kv.buffer import KVBuffer

Run = tuple[int, int]  # begin and end (exclusive) of neighbouring slots


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
