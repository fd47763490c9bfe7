"""Where the KV of one prompt in a batch (a row) lies: in its own buffer and in other rows' buffers.

Rows with the same KV refer to one copy of it, whichever row made it. `pieces` finds what the rows
of a batch have in common. Rows' own buffers lie in one tensor (a slab), so that one kernel call
reads all of them: they have the same capacity, and as rows use different parts of it, a mask hides
the rest. Knows slots and buffers; knows no token and no prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from cached_rag.kv.buffer import KVBuffer, ModuleKV, rounded
from cached_rag.kv.layers import KVShapes, stacks_of

# Longer buffers gain nothing by it: to read their keys takes longer than to call a kernel.
LONGEST_SLAB = 1024
# Rows of a slab: on a CPU those that were never used take no memory.
_ROWS = {"cpu": 16}
_FEW_ROWS = 4


@dataclass(frozen=True)
class Run:
    """Says that a row's slots from `slot` on are a buffer's slots `begin` to `end` (exclusive)."""

    buffer: KVBuffer
    begin: int
    end: int
    slot: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def shift(self) -> int:
        """What to add to the row's slots to get the buffer's."""
        return self.begin - self.slot

    def cut(self, first: int, last: int) -> Run | None:
        """Its part in the row's slots `first` to `last` (exclusive); None if there is none."""
        low, high = max(first, self.slot), min(last, self.slot + len(self))
        if low >= high:
            return None
        return Run(self.buffer, low + self.shift, high + self.shift, low)

    def module(self, token_ids: Sequence[int]) -> ModuleKV:
        """Its KV as views of the buffer.

        Args:
            token_ids: its tokens, which stand at positions that are their slots in the row.
        """
        keys, values = self.buffer.keys, self.buffer.values
        at = slice(self.begin, self.end)
        return ModuleKV(tuple(token_ids), self.slot, keys[:, 0, :, at], values[:, 0, :, at])


class RowKV:
    """One row's KV: runs in any buffers, and behind them slots in a buffer of its own.

    Attributes:
        own: its own buffer, to which tokens are added.
        length: number of slots that are filled.
        positions: those of its slots; None if slot i is position i.
    """

    def __init__(
        self, own: KVBuffer, length: int, runs: Sequence[Run] = (), begin: int = 0
    ) -> None:
        """Refer to KV that exists.

        Args:
            runs: where its first slots lie, in order; those behind them lie in `own`.
            begin: the slot of `own` in which the first slot behind the runs lies.
        """
        self.own, self.length, self.runs = own, length, tuple(runs)
        self._slot = runs[-1].slot + len(runs[-1]) if runs else 0
        self._begin = begin
        self.positions = own.positions

    def lay_out(self, positions: Sequence[int] | None) -> None:
        """Set the positions of a row without runs; see `KVBuffer.lay_out`."""
        self.positions = self.own.lay_out(positions).positions

    def position(self, slot: int) -> int:
        """The position of the token in a slot."""
        if self.positions is None:
            return slot
        last = len(self.positions) - 1  # behind it there are no gaps
        return int(self.positions[min(slot, last)]) + max(0, slot - last)

    def goes_on_in(self, page: KVBuffer) -> None:
        """Put the tokens that come next into another buffer; nothing is copied.

        What layers keep of the tokens so far goes along: it is looked for where the row ends.
        """
        self.runs, self._slot, self._begin = self.every_run(), self.length, 0
        page.states, page.snapshots = self.own.states, self.own.snapshots
        self.own.states, self.own.snapshots = None, {}
        self.own = page

    def at(self, slot: int) -> int:
        """The slot of its own buffer in which a slot behind the runs lies."""
        return self._begin + slot - self._slot

    def every_run(self, length: int | None = None) -> tuple[Run, ...]:
        """All runs up to a length (None: all that is filled), with one for the part in `own`."""
        end = self.length if length is None else length
        if end == self._slot:
            return self.runs
        return (*self.runs, Run(self.own, self._begin, self.at(end), self._slot))

    def cut(self, first: int, last: int) -> list[Run]:
        """Runs that together are its slots `first` to `last` (exclusive)."""
        found = (run.cut(first, last) for run in self.every_run())
        return [run for run in found if run is not None]

    def copy(self, first: int, last: int) -> KVBuffer:
        """A buffer with nothing but slots `first` to `last` (exclusive)."""
        found = self.own.new(last - first)
        self._copy_to(found, 0, first, last)
        return found

    def _copy_to(self, buffer: KVBuffer, at: int, first: int, last: int) -> None:
        """Put slots `first` to `last` (exclusive) into a buffer's slots from `at` on."""
        for run in self.cut(first, last):
            end = at + len(run)
            pairs = (buffer.keys, run.buffer.keys), (buffer.values, run.buffer.values)
            for own, theirs in pairs:
                for to, stack in zip(stacks_of(own), stacks_of(theirs), strict=True):
                    to[:, :, :, at:end] = stack[:, :, :, run.begin : run.end]
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
        """All buffers in which some of it lies."""
        yield self.own
        yield from (run.buffer for run in self.runs)


@dataclass(frozen=True)
class Piece:
    """Slots `begin` to `end` (exclusive) of a buffer, and the numbers of the rows that use them."""

    buffer: KVBuffer
    begin: int
    end: int
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return self.end - self.begin


def pieces(rows: Sequence[Sequence[Run]]) -> list[Piece]:
    """All slots that rows refer to, cut so that each row uses all of a piece or none of it.

    Args:
        rows: the runs of each row.
    """
    by_buffer: dict[int, list[tuple[Run, int]]] = {}
    for index, runs in enumerate(rows):
        for run in runs:
            by_buffer.setdefault(id(run.buffer), []).append((run, index))
    found: list[Piece] = []
    for held in by_buffer.values():
        found += _cut(held)
    return found


def _cut(held: Sequence[tuple[Run, int]]) -> list[Piece]:
    """The pieces of one buffer, given the runs in it and their rows' numbers."""
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


class Slab:
    """Keys and values of several rows, each the buffer of a prompt.

    Attributes:
        free: numbers of the rows that nobody uses.
        whole: keys and values of all rows, which are its batch.
    """

    def __init__(self, shapes: KVShapes, rows: int, capacity: int) -> None:
        self.whole = KVBuffer.like(shapes, capacity, rows)
        self.free = list(range(rows))[::-1]
        self._fresh = set(self.free)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: on a CPU only those of rows that were ever used."""
        used = sum(map(self.is_held, range(self.whole.batch)))
        return self.whole.nbytes // self.whole.batch * used

    def is_held(self, row: int) -> bool:
        """Whether a row takes memory: on a CPU only if it was ever used."""
        return row not in self._fresh or self.whole.keys.device.type != "cpu"

    def take(self) -> SlabRow:
        """A free row; there has to be one."""
        row = self.free[-1]
        found = SlabRow(self, row)
        self._fresh.discard(row)
        found.keys.zero_()  # masked slots are read, too, so they must not hold NaN, whoever left it
        found.values.zero_()
        self.free.pop()
        return found


class SlabRow(KVBuffer):
    """One row of a slab."""

    def __init__(self, slab: Slab, row: int) -> None:
        whole, at = slab.whole, (slice(None), slice(row, row + 1))
        super().__init__(whole.keys[at], whole.values[at])
        self.slab, self.row = slab, row


class Slabs:
    """All slabs of one model, by capacity. For one thread at a time."""

    def __init__(self, shapes: KVShapes) -> None:
        self._shapes = shapes
        self._slabs: dict[int, list[Slab]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, rows that nobody uses now among them."""
        return sum(slab.nbytes for held in self._slabs.values() for slab in held)

    def take(self, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` slots: a slab's row, unless that would be too long."""
        if capacity > LONGEST_SLAB:
            return KVBuffer.like(self._shapes, capacity)
        size = rounded(capacity)
        held = self._slabs.setdefault(size, [])
        slab = next((slab for slab in held if slab.free), None)
        if slab is None:
            rows = _ROWS.get(self._shapes.device.type, _FEW_ROWS)
            slab = Slab(self._shapes, rows, size)
            held.append(slab)
        return slab.take()

    def cost(self, capacity: int) -> int:
        """Bytes that `take` would add to what there is."""
        if capacity > LONGEST_SLAB:
            return capacity * self._shapes.bytes_per_token
        size, is_cpu = rounded(capacity), self._shapes.device.type == "cpu"
        for slab in self._slabs.get(size, ()):
            if slab.free:
                return 0 if slab.is_held(slab.free[-1]) else size * self._shapes.bytes_per_token
        return size * self._shapes.bytes_per_token * (1 if is_cpu else _FEW_ROWS)

    def give(self, buffer: KVBuffer) -> None:
        """Take a slab's row back that nobody reads any more; other buffers are just dropped."""
        if isinstance(buffer, SlabRow):
            buffer.slab.free.append(buffer.row)

    def drop_idle(self) -> None:
        """Free the memory of slabs of which no row is used."""
        for capacity, held in self._slabs.items():
            self._slabs[capacity] = [slab for slab in held if len(slab.free) < slab.whole.batch]


def mask_of(
    spans: dict[int, tuple[int, int]], first: int, last: int, like: torch.Tensor
) -> torch.Tensor:
    """A mask to add to attention scores: 0 where a row sees a slot, -inf elsewhere.

    Args:
        spans: for each row, the slots that it sees (begin, end); other rows see none.
        first, last: the first and the last row of the mask.
        like: a tensor that has the dtype and device wanted.

    Returns:
        (last - first + 1, 1, 1, length), where length is the largest end.
    """
    length = max(end for _, end in spans.values())
    mask = torch.full((last - first + 1, 1, 1, length), -torch.inf)
    for row, (begin, end) in spans.items():
        mask[row - first, ..., begin:end] = 0
    return mask.to(like.device, like.dtype)
