"""What prompts that are being answered have in common, so that it is kept and read once.

A prompt that begins as another does takes the other's KV of that beginning, where both are exact;
chunks that neither repairs are shared wherever they stand (Prompt Cache, section 3.4;
RelayAttention, section 3.3 and appendix D). What finished prompts left is in `Sequences`. Knows
tokens and KV; computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.rows import RowKV, Run
from cached_rag.kv.slab import Slabs
from cached_rag.library.plan import Placement
from cached_rag.library.sequences import MIN_SHARED, Ids, Sequences, common, where

_Name = tuple[int, int, int]


@dataclass(frozen=True)
class Beginning:
    """KV of a prompt's first tokens that is there.

    Attributes:
        runs: where.
        exact_length: how many of the tokens have the KV that full prefill computes.
        is_coming: whether there will be more, once a running prompt is prefilled.
    """

    runs: tuple[Run, ...] = ()
    exact_length: int = 0
    is_coming: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def pieces(self, ids: Sequence[int]) -> list[ModuleKV]:
        """The same, to be placed at a prompt's beginning."""
        return [
            ModuleKV(
                tuple(ids[run.slot : run.slot + len(run)]),
                run.slot,
                run.buffer.keys[:, 0, :, run.begin : run.end],
                run.buffer.values[:, 0, :, run.begin : run.end],
            )
            for run in self.runs
        ]


NOTHING = Beginning()


@dataclass(eq=False)
class Row:
    """A prompt that is being answered, as far as others may share it.

    Attributes:
        namespace: its tenant's; tenants share nothing.
        ids: (seq_len,) of the prompt.
        exact_length: tokens from the first whose KV is, or will be, what full prefill computes.
        kv: where it lies.
        chunks: its unrepaired chunks' first and last slot (exclusive), by name.
        held: what the names are addresses of.
        is_private: it has a text that was forgotten, so nothing of it is for others any more.
    """

    namespace: str
    ids: Ids
    exact_length: int
    kv: RowKV = field(init=False)
    chunks: dict[_Name, tuple[int, int]] = field(default_factory=dict)
    held: tuple[ModuleKV, ...] = ()
    is_private: bool = False

    @property
    def num_shared(self) -> int:
        """Tokens whose KV lies in others' buffers."""
        return sum(len(run) for run in self.kv.runs if run.buffer is not self.kv.own)


class Sharing:
    """The prompts that are being answered now. Used by one thread at a time.

    Args:
        shares: whether they share anything; else each keeps all of its KV.
    """

    def __init__(self, shapes: KVShapes, *, shares: bool = True) -> None:
        self._shares = shares
        self._rows: list[Row] = []
        self._slabs = Slabs(shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of prompts that are being answered, each buffer once."""
        return sum(buffer.nbytes for buffer in _buffers(self._rows).values())

    def beginning(
        self, kept: Sequences, namespace: str, ids: Sequence[int], limit: int, repair: str
    ) -> Beginning:
        """The longest KV of a prompt's beginning that there is.

        Args:
            kept: what finished prompts left.
            limit: tokens of it that are exact with or without others; from running prompts no
                more is taken, so that an answer is the same with them or without.
            repair: see `Sequences.beginning`.
        """
        wanted = np.asarray(ids[:-1])  # the last token's logits are wanted
        running, coming = self._running_beginning(namespace, wanted[:limit])
        finished = kept_beginning(kept, namespace, ids, limit, repair)
        best = finished if len(finished) > len(running) else running
        return replace(best, is_coming=coming - len(best) >= MIN_SHARED)

    def _running_beginning(self, namespace: str, wanted: Ids) -> tuple[Beginning, int]:
        """What running prompts have of a beginning, and how much they will have."""
        count, coming, best = MIN_SHARED - 1, 0, None
        for row in self._rows if self._shares else ():
            if row.namespace == namespace and row.kv.positions is None and not row.is_private:
                length = min(common(wanted, row.ids), row.exact_length)
                coming = max(coming, length)
                if min(length, row.kv.length) > count:
                    count, best = min(length, row.kv.length), row
        found = Beginning(tuple(best.kv.cut(0, count)), count) if best else NOTHING
        return found, coming

    def begin(
        self, row: Row, beginning: Beginning, positions: Sequence[int] | None, room: int
    ) -> Row:
        """A prompt whose KV behind its beginning is still to be computed, as full prefill would.

        Args:
            positions: of its tokens; None for their slots.
            room: for how many tokens of an answer.
        """
        shared = self._long_runs(beginning.runs)
        own = self._slabs.take(len(row.ids) - sum(map(len, shared)) + room)
        row.kv = RowKV(own, len(beginning), beginning.runs).moved(shared, own)
        row.kv.lay_out(positions)
        self._rows.append(row)
        return row

    def adopt(
        self,
        row: Row,
        whole: KVBuffer,
        beginning: Beginning,
        unrepaired: Sequence[Placement],
        room: int,
    ) -> Row:
        """A prompt that is prefilled; what others have is taken from them.

        Args:
            whole: the prompt's KV. It is the row's own buffer, if nothing is shared.
            unrepaired: cached KV that is the same in the prompt.
            room: as for `begin`.
        """
        named = {_name(p, whole): p for p in unrepaired} if self._shares else {}
        shared = [*self._long_runs(beginning.runs), *self._elsewhere(named, len(beginning))]
        row.kv, count = RowKV(whole, len(row.ids)), len(row.ids)
        if shared:
            own = self._slabs.take(count - sum(map(len, shared)) + room)
            row.kv = row.kv.moved(shared, own)
        row.chunks = {name: (place.begin, place.end) for name, place in named.items()}
        row.held = tuple(p.kv for p in named.values() if isinstance(p.kv, ModuleKV))
        self._rows.append(row)
        return row

    def leave(self, row: Row) -> bool:
        """An answer is over; says whether its own buffer is free, for nobody refers to it."""
        self._rows.remove(row)
        used = _buffers(self._rows)
        for name, buffer in _buffers([row]).items():
            if name not in used:
                self._slabs.give(buffer)
        if not used:
            self._slabs.drop_idle()
        return id(row.kv.own) not in used

    def forget(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Let no prompt to come have what a tenant's prompts hold that contain these tokens."""
        wanted = np.asarray(token_ids, dtype=np.int64)
        for row in self._rows:
            if row.namespace == namespace and where(row.ids, wanted):
                row.is_private = True

    def _long_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Those that are worth being read for themselves."""
        return [run for run in runs if len(run) >= MIN_SHARED] if self._shares else []

    def _elsewhere(self, named: dict[_Name, Placement], done: int) -> list[Run]:
        """Runs of chunks behind slot `done` that other rows have, neighbours joined."""
        found: list[Run] = []
        for name, place in sorted(named.items(), key=lambda item: item[1].begin):
            if place.begin < done:
                continue
            for row in self._rows:
                if name in row.chunks:
                    first, last = row.chunks[name]
                    moved = place.begin - first
                    for run in row.kv.cut(first, last):
                        _join(found, Run(run.buffer, run.begin, run.end, run.slot + moved))
                    break
        return [run for run in found if len(run) >= MIN_SHARED]


def kept_beginning(
    kept: Sequences, namespace: str, ids: Sequence[int], limit: int, repair: str
) -> Beginning:
    """What finished prompts left of a prompt's beginning; see `Sharing.beginning`."""
    most = len(ids) - 1 if kept.keeps_repaired else min(limit, len(ids) - 1)
    sequence, length = kept.beginning(namespace, np.asarray(ids[:most]), repair)
    if sequence is None:
        return NOTHING
    return Beginning(sequence.cut(length), min(length, sequence.exact_length))


def _buffers(rows: Sequence[Row]) -> dict[int, KVBuffer]:
    """What they refer to, each once, by identity."""
    return {id(buffer): buffer for row in rows for buffer in row.kv.buffers()}


def _join(runs: list[Run], run: Run) -> None:
    """Add a run, to the last one if it goes on there."""
    last = runs[-1] if runs else None
    if last and last.buffer is run.buffer and last.shift == run.shift and last.end == run.begin:
        runs[-1] = Run(last.buffer, last.begin, run.end, last.slot)
    else:
        runs.append(run)


def _name(place: Placement, whole: KVBuffer) -> _Name:
    """The same for the same KV at the same positions."""
    kv = place.kv
    assert isinstance(kv, ModuleKV)
    return kv.values.data_ptr(), kv.seq_len, whole.position(place.begin) - kv.start
