"""A prompt that is put together in a llama.cpp context: stored KV, and tokens that are computed.

llama.cpp computes a token only behind the last of its sequence. So a prompt is put together from
its first token to its last, run by run: KV from the buffer up to the next run, the run computed,
and so on. Each computed token then sees exactly what stands before it.

Where a few tokens of a chunk are computed again, that would take a call of llama.cpp for each of
them. But sequences may have tokens in common, without a copy. So each run gets a sequence of its
own, a branch, which has the prompt's tokens before it and no others. Branches are computed in one
call, and the prompt takes the tokens over, in place of those that it had. They see each other's
stored KV, not the new one; hence a chunk takes more than one call, where that costs little
(`calls`). Knows KV and layouts; chooses no token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.state_format import Part
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.row_cache import Drift
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import Layout

Run = tuple[int, int]  # begin and end (exclusive) of neighbouring slots
# Tokens of a call. Behind long prompts, llama.cpp's attention takes half the time for as many
# tokens as the second number or more. In short prompts it matters little, and more calls are nearer
# to full prefill.
_FEW, _MANY = 12, 64
_SHORT = 1024
# Branches of a call, as a share of the sequences that there may be.
_SHARE = 2


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


@dataclass(frozen=True)
class Call:
    """Runs that are computed together.

    Attributes:
        runs: ascending.
        chunk: the chunk in which all of them end; None if there is none.
    """

    runs: tuple[Run, ...]
    chunk: Run | None = None


def calls(runs: Sequence[Run], layout: Layout) -> Iterator[Call]:
    """A prompt's runs by the calls that compute them, in order."""
    cut = [part for run in runs for part in _cut(run, layout.modules)]
    for chunk, own in groupby(cut, lambda run: _around(run[1], layout.modules)):
        if chunk is None:
            yield from (Call((run,)) for run in own)
            continue
        left = list(own)
        if left[0][0] <= chunk[0]:  # its beginning comes first, as the others attend to it most
            yield Call((left.pop(0),), chunk)
        yield from (Call(tuple(part), chunk) for part in _parts(left))


def _cut(run: Run, chunks: Sequence[Run]) -> Iterator[Run]:
    """A run, cut where it leaves a chunk that it has a part of, and before it enters such a one."""
    begin, end = run
    ends = [after for _, after in chunks if begin < after < end]
    left, entered = _around(begin, chunks), _around(end, chunks)
    at = {left[1]} if left and left[0] < begin and left[1] in ends else set()
    at |= {ends[-1]} if entered and entered[0] < end < entered[1] and ends else set()
    yield from pairwise([begin, *sorted(at), end])


def _around(slot: int, chunks: Sequence[Run]) -> Run | None:
    """The chunk that has the token before a slot, and perhaps the slot."""
    return next((chunk for chunk in chunks if chunk[0] < slot <= chunk[1]), None)


def _parts(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """A chunk's runs, in parts of about as many tokens as a call should have."""
    count = sum(end - begin for begin, end in runs)
    if not count:
        return
    parts = max(1, count // (_FEW if runs[-1][1] < _SHORT else _MANY))
    before = 0
    found: list[list[Run]] = [[] for _ in range(parts)]
    for begin, end in runs:
        found[before * parts // count].append((begin, end))
        before += end - begin
    yield from (part for part in found if part)


class Assembly:
    """One prompt on its way.

    Attributes:
        positions: of its slots.
        done: how many of its slots, from the first, are in the sequence.
    """

    def __init__(
        self,
        context: LlamaContext,
        sequence: int,
        buffer: KVBuffer,
        ids: Sequence[int],
        fresh: torch.Tensor | None = None,
        row: int = 0,
    ) -> None:
        """Begin with an empty sequence.

        Args:
            buffer: has the KV of the prompt's tokens, and gets that of the computed ones.
            ids: the prompt's.
            fresh: (seq_len,) bool; without KV in the buffer. None for no tokens.
            row: which prompt of the buffer it is.
        """
        self._context, self._sequence, self._buffer, self._row = context, sequence, buffer, row
        self._ids = ids
        self._stored = torch.ones(len(ids), dtype=torch.bool) if fresh is None else ~fresh
        self.positions = [buffer.position(slot) for slot in range(len(ids))]
        self._before: KVBuffer | None = None  # the KV of a chunk as it was stored
        self._computed: list[Run] = []  # in that chunk
        self.done = 0

    def fill(self, slots: Sequence[int], num_logits: int) -> torch.Tensor:
        """Compute some of the prompt's tokens, whatever KV they have, each run by itself.

        Args:
            slots: of the tokens, ascending, the last one among them.

        Returns:
            (num_logits, vocab_size) logits of the last tokens.

        Raises:
            FullError: the context has too few free cells.

        Effects: writes their KV to the buffer.
        """
        self._stored[list(slots)] = False
        left, found = len(slots), []
        for begin, end in neighbours(slots, self.positions):
            left -= end - begin
            wanted = min(end - begin, max(0, num_logits - left))
            found.append(self.append((begin, end), wanted))
        return torch.cat(found)

    def append(self, run: Run, num_logits: int = 0) -> torch.Tensor:
        """Compute the prompt's next run, over the stored KV of what stands before it.

        Returns:
            (num_logits, vocab_size) logits of its last tokens.

        Raises:
            FullError: the context has too few free cells.
        """
        begin, end = run
        self._put(begin)
        if gap := self._gap(begin):
            self._context.relabel(self._sequence, gap)
        work = Work(self._sequence, self._ids[begin:end], self.positions[begin], num_logits)
        logits = self._context.compute([work])
        self._read(begin, end)
        self.done = end
        return logits

    def repair(self, call: Call, *, moves: bool) -> None:
        """Compute a chunk's runs, in place of their stored KV.

        What fails on the way may be done again over what the buffer has then: what was computed
        comes out alike, and so nothing moves twice.

        Args:
            moves: move the chunk's other tokens as the computed ones are (`row_cache.Drift`).

        Raises:
            FullError: the context has too few free cells or sequences.
        """
        assert call.chunk is not None
        begin, end = call.chunk
        if self.done < end:  # the chunk's first call
            self._computed = []
            if moves:
                own = (slice(None), slice(None), slice(None), slice(begin, end))
                keys, values = self._buffer.keys[own], self._buffer.values[own]
                self._before = KVBuffer(keys.clone(), values.clone())
        self._put(end)
        most = self._context.max_sequences // _SHARE
        for at in range(0, len(call.runs), most):
            self._replace(call.runs[at : at + most])
        self._read(call.runs[0][0], call.runs[-1][1])
        self._computed += [(max(begin, one), other) for one, other in call.runs if other > begin]
        if moves:
            self._move(begin, end)

    def _replace(self, runs: Sequence[Run]) -> None:
        """Compute runs in one call, and let the sequence have them in place of what it had."""
        context, branches = self._context, []
        try:
            for begin, _ in runs:
                branches.append(context.branch(self._sequence, self.positions[begin]))
                if gap := self._gap(begin):
                    context.relabel(branches[-1], gap)
            context.compute(
                [
                    Work(branch, self._ids[begin:end], self.positions[begin], 0)
                    for branch, (begin, end) in zip(branches, runs, strict=True)
                ]
            )
            for branch, (begin, end) in zip(branches, runs, strict=True):
                first, last = self.positions[begin], self.positions[end - 1]
                replaced = int(self._stored[begin:end].sum())
                context.graft(branch, self._sequence, first, last + 1, replaced)
        finally:
            for branch in branches:
                context.drop(branch)

    def _move(self, begin: int, end: int) -> None:
        """Move the tokens of a chunk that are not computed, from their stored KV."""
        assert self._before is not None
        slots = torch.cat([torch.arange(*run) for run in self._computed]).sort().values
        moved = KVBuffer(self._before.keys.clone(), self._before.values.clone())
        drift, rows = Drift([(0, end - begin)]), Rows(slots - begin, end - begin)
        for layer in range(self._context.shapes.num_layers):
            fresh = [side[layer][:, :, slots] for side in (self._buffer.keys, self._buffer.values)]
            drift.transfer(layer, rows, fresh[0], fresh[1], moved)
            moved.write(layer, rows.slots, fresh[0], fresh[1])
            every = slice(begin, end)
            self._buffer.write(layer, every, moved.keys[layer], moved.values[layer])
        first, last = self.positions[begin], self.positions[end - 1]
        self._context.cut(self._sequence, first, end - begin, last + 1)
        self._context.put(self._sequence, self.positions[begin:end], self._room(begin, end))

    def _put(self, end: int) -> None:
        """Have the stored KV of the slots before `end` in the sequence."""
        stored = self._stored[self.done : end].nonzero().squeeze(1) + self.done
        for one, other in neighbours(stored.tolist(), range(len(self._ids))):
            self._context.put(self._sequence, self.positions[one:other], self._room(one, other))
        self.done = max(self.done, end)

    def _gap(self, slot: int) -> int:
        """How many positions are left out before a slot."""
        return self.positions[slot] - self.positions[slot - 1] - 1 if slot else 0

    def _read(self, begin: int, end: int) -> None:
        self._context.read(self._sequence, self.positions[begin], self._room(begin, end))

    def _room(self, begin: int, end: int) -> Part:
        return part_of(self._buffer, begin, end, self._row)


def part_of(buffer: KVBuffer, begin: int, end: int, row: int = 0) -> Part:
    """Views of the keys and values of some slots."""
    at = (slice(None), row, slice(None), slice(begin, end))
    return buffer.keys[at], buffer.values[at]
