"""Where the keys and values of one prompt lie: in a buffer of its own, and in others' buffers.

Rows that have the same KV refer to one copy of it, whoever made it. `pieces` finds what the rows
of a batch have in common. Knows slots and buffers; knows no token and no prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cached_rag.kv.buffer import KVBuffer


@dataclass(frozen=True)
class Run:
    """A prompt's slots from `slot` on are a buffer's slots `begin` to `end` (exclusive)."""

    buffer: KVBuffer
    begin: int
    end: int
    slot: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def shift(self) -> int:
        """From the prompt's slots to the buffer's."""
        return self.begin - self.slot

    def cut(self, first: int, last: int) -> Run | None:
        """What lies in the prompt's slots `first` to `last` (exclusive); None if nothing does."""
        low, high = max(first, self.slot), min(last, self.slot + len(self))
        if low >= high:
            return None
        return Run(self.buffer, low + self.shift, high + self.shift, low)


class RowKV:
    """One prompt's KV: fixed runs, and behind them what grows, in a buffer of its own.

    Attributes:
        own: the buffer that grows.
        length: slots that are filled.
        positions: of all slots, where they are not the slots (`own.positions`).
    """

    def __init__(
        self,
        own: KVBuffer,
        length: int,
        runs: Sequence[Run] = (),
        begin: int = 0,
    ) -> None:
        """Refer to KV that is there.

        Args:
            runs: of the first slots, in order; the slots behind them are in `own`.
            begin: where in `own` the slots behind the runs lie.
        """
        self.own, self.length, self.runs = own, length, tuple(runs)
        self._slot = runs[-1].slot + len(runs[-1]) if runs else 0
        self._begin = begin
        self.positions = own.positions

    def lay_out(self, positions: Sequence[int] | None) -> None:
        """Set the positions of a row without runs; None for slots."""
        self.positions = self.own.lay_out(positions).positions

    def position(self, slot: int) -> int:
        """Where the token in a slot stands."""
        return slot if self.positions is None else int(self.positions[slot])

    def at(self, slot: int) -> int:
        """Where in its own buffer a slot behind the runs lies."""
        return self._begin + slot - self._slot

    def every_run(self, length: int | None = None) -> tuple[Run, ...]:
        """All runs up to a length, what grows included."""
        end = self.length if length is None else length
        if end == self._slot:
            return self.runs
        return (*self.runs, Run(self.own, self._begin, self.at(end), self._slot))

    def cut(self, first: int, last: int) -> list[Run]:
        """The runs that hold slots `first` to `last` (exclusive)."""
        found = (run.cut(first, last) for run in self.every_run())
        return [run for run in found if run is not None]

    def copy(self, first: int, last: int) -> KVBuffer:
        """A buffer with nothing but slots `first` to `last` (exclusive)."""
        keys, values = self.own.keys, self.own.values
        sizes = [(*side.shape[:3], last - first, side.shape[4]) for side in (keys, values)]
        found = KVBuffer(*(keys.new_empty(size) for size in sizes))
        self._copy_to(found, 0, first, last)
        return found

    def _copy_to(self, buffer: KVBuffer, at: int, first: int, last: int) -> None:
        """Put slots `first` to `last` (exclusive) into a buffer's slots from `at` on."""
        for run in self.cut(first, last):
            end = at + len(run)
            buffer.keys[:, :, :, at:end] = run.buffer.keys[:, :, :, run.begin : run.end]
            buffer.values[:, :, :, at:end] = run.buffer.values[:, :, :, run.begin : run.end]
            at = end

    def moved(self, shared: Sequence[Run], own: KVBuffer) -> RowKV:
        """The same KV, but for slots that others have: of them theirs, all else copied to `own`.

        Args:
            shared: what others have of it, ascending.
        """
        own.positions = self.positions
        runs: list[Run] = []
        slot = at = 0
        for run in shared:
            if gap := run.slot - slot:
                self._copy_to(own, at, slot, run.slot)
                runs.append(Run(own, at, at + gap, slot))
                at += gap
            runs.append(run)
            slot = run.slot + len(run)
        self._copy_to(own, at, slot, self.length)
        return RowKV(own, self.length, runs, begin=at)

    def buffers(self) -> Iterator[KVBuffer]:
        """All buffers that hold a part of it."""
        yield self.own
        yield from (run.buffer for run in self.runs)


@dataclass(frozen=True)
class Piece:
    """Slots of a buffer, and the rows (by number) that have them."""

    buffer: KVBuffer
    begin: int
    end: int
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return self.end - self.begin


def pieces(rows: Sequence[Sequence[Run]]) -> list[Piece]:
    """All that rows refer to, cut so that of each piece every row has all or nothing."""
    by_buffer: dict[int, list[tuple[Run, int]]] = {}
    for index, runs in enumerate(rows):
        for run in runs:
            by_buffer.setdefault(id(run.buffer), []).append((run, index))
    found: list[Piece] = []
    for held in by_buffer.values():
        found += _cut(held)
    return found


def _cut(held: Sequence[tuple[Run, int]]) -> list[Piece]:
    """The pieces of one buffer."""
    buffer = held[0][0].buffer
    borders = sorted({border for run, _ in held for border in (run.begin, run.end)})
    found: list[Piece] = []
    for low, high in pairwise(borders):
        owners = tuple(i for run, i in held if run.begin <= low and high <= run.end)
        if not owners:
            continue
        last = found[-1] if found else None
        if last is not None and last.end == low and last.rows == owners:
            found[-1] = Piece(buffer, last.begin, high, owners)
        else:
            found.append(Piece(buffer, low, high, owners))
    return found
