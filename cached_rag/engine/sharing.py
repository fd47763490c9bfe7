"""What prompts that are being answered have in common, so that it is kept and read once.

A prompt that begins as another does takes the other's KV of that beginning, where both are exact;
modules that neither repairs are shared wherever they stand (Prompt Cache, section 3.4;
RelayAttention, section 3.3 and appendix D). Some that are finished are kept for what begins alike;
what outlives the process is the store's. Knows tokens and KV; computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cached_rag.engine.decoding import Prefill
from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.rows import RowKV, Run
from cached_rag.kv.slab import Slabs
from cached_rag.library.plan import Placement

# Each run that is read for itself costs a kernel call a layer; shorter ones are copied.
MIN_SHARED = 128

_Name = tuple[int, int, int]


@dataclass(eq=False)
class Row:
    """A prompt that is being answered.

    Attributes:
        namespace: its tenant's; tenants share nothing.
        exact_length: tokens from the first whose KV is what full prefill computes.
        modules: its unrepaired modules' first and last slot (exclusive), by name.
        held: what the names are addresses of.
    """

    namespace: str
    ids: npt.NDArray[np.int64]
    kv: RowKV
    exact_length: int
    modules: dict[_Name, tuple[int, int]]
    held: tuple[ModuleKV, ...] = ()


class Live:
    """The prompts that are being answered now, and some that were. Used by one thread at a time.

    Args:
        shares: whether they share anything; else each keeps all of its KV.
        recent_bytes: most bytes of KV of finished prompts and their answers, kept for those to
            come that begin alike: the next turn of a conversation, another with its system prompt.
    """

    def __init__(self, shapes: KVShapes, *, shares: bool = True, recent_bytes: int = 0) -> None:
        self._shapes, self._shares = shapes, shares
        self._recent_bytes = recent_bytes if shares else 0
        self._rows: list[Row] = []
        self._recent: list[Row] = []  # least recently used first
        self._slabs = Slabs(shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of prompts that are being answered, each buffer once."""
        return sum(buffer.nbytes for buffer in _buffers(self._rows).values())

    @property
    def recent_nbytes(self) -> int:
        """Bytes of the KV that is kept of finished ones."""
        return sum(buffer.nbytes for buffer in _buffers(self._recent).values())

    def beginning(
        self, namespace: str, ids: Sequence[int], limit: int
    ) -> tuple[tuple[Run, ...], bool]:
        """The longest exact KV of a prompt's beginning that there is.

        Args:
            limit: most tokens of it.

        Returns:
            The runs, and whether there will be more once a row's own prompt is prefilled.
        """
        count, coming, best = MIN_SHARED - 1, 0, None
        asked = np.asarray(ids[: min(limit, len(ids) - 1)])  # the last token's logits are wanted
        for row in (*self._rows, *self._recent) if self._shares else ():
            if row.namespace == namespace and row.kv.positions is None:
                common = min(_common(asked, row.ids), row.exact_length)
                coming = max(coming, common)
                if min(common, row.kv.length) > count:
                    count, best = min(common, row.kv.length), row
        if best in self._recent:
            self._recent.remove(best)
            self._recent.append(best)
        runs = tuple(best.kv.cut(0, count)) if best else ()
        return runs, coming - (count if best else 0) >= MIN_SHARED

    def begin(self, namespace: str, ids: Sequence[int], runs: Sequence[Run], room: int) -> Row:
        """A prompt whose KV behind `runs` is still to be computed, as full prefill would."""
        done = runs[-1].slot + len(runs[-1]) if runs else 0
        own = self._slabs.take(len(ids) - done + room)
        row = Row(namespace, np.asarray(ids), RowKV(own, done, runs), len(ids), {})
        self._rows.append(row)
        return row

    def adopt(self, namespace: str, prefill: Prefill, runs: Sequence[Run], room: int) -> Row:
        """A prefilled prompt; what others have is taken from them, and its buffer given back.

        Args:
            runs: its beginning, as `beginning` gave it.
        """
        whole, count = prefill.buffer, len(prefill.tokens)
        named = {_name(p, whole): p for p in prefill.as_they_are} if self._shares else {}
        done = runs[-1].slot + len(runs[-1]) if runs else 0
        found = [*runs, *self._elsewhere(named, done)]
        if found:
            kv = self._rest_copied(prefill, found, room)
            per_token = self._shapes.bytes_per_token
            prefill.report.kv_bytes = kv.own.nbytes
            prefill.report.shared_kv_bytes = sum(map(len, found)) * per_token
            prefill.remember()
            prefill.give_back()
        else:
            kv = RowKV(whole, count)
        modules = {name: (place.begin, place.end) for name, place in named.items()}
        held = tuple(place.kv for place in named.values() if isinstance(place.kv, ModuleKV))
        ids = np.asarray(prefill.tokens.ids)
        row = Row(namespace, ids, kv, prefill.exact_length, modules, held)
        self._rows.append(row)
        return row

    def leave(self, row: Row, answer_ids: Sequence[int]) -> bool:
        """An answer is over; says whether its own buffer is free, for nobody refers to it."""
        self._rows.remove(row)
        gone = [row, *self._keep(row, answer_ids)] if self._is_worth_keeping(row) else [row]
        used = _buffers([*self._rows, *self._recent])
        for name, buffer in _buffers(gone).items():
            if name not in used:
                self._slabs.give(buffer)
        if not used:
            self._slabs.drop_idle()
        return id(row.kv.own) not in used

    def _keep(self, row: Row, answer_ids: Sequence[int]) -> list[Row]:
        """Keep a finished row; returns those that have to go, or of which it has all."""
        kept = _with_answer(row, answer_ids)
        gone = [old for old in self._recent if _has_all(kept, old)]
        self._recent = [old for old in self._recent if old not in gone] + [kept]
        while self._recent and self.recent_nbytes > self._recent_bytes:
            gone.append(self._recent.pop(0))
        return gone

    def _is_worth_keeping(self, row: Row) -> bool:
        exact = min(row.exact_length, row.kv.length)
        return self._recent_bytes > 0 and row.kv.positions is None and exact >= MIN_SHARED

    def _elsewhere(self, named: dict[_Name, Placement], done: int) -> list[Run]:
        """Runs of modules behind slot `done` that other rows have, neighbours joined."""
        found: list[Run] = []
        for name, place in sorted(named.items(), key=lambda item: item[1].begin):
            if place.begin < done:
                continue
            for row in self._rows:
                if name in row.modules:
                    first, last = row.modules[name]
                    moved = place.begin - first
                    for run in row.kv.cut(first, last):
                        _join(found, Run(run.buffer, run.begin, run.end, run.slot + moved))
                    break
        return [run for run in found if len(run) >= MIN_SHARED]

    def _rest_copied(self, prefill: Prefill, found: Sequence[Run], room: int) -> RowKV:
        """The prompt's KV: `found`, and a buffer with all else."""
        whole, count = prefill.buffer, len(prefill.tokens)
        own = self._slabs.take(count - sum(map(len, found)) + room)
        own.positions = whole.positions
        runs: list[Run] = []
        slot = at = 0
        for run in (*found, None):
            gap = (count if run is None else run.slot) - slot
            own.keys[:, :, :, at : at + gap] = whole.keys[:, :, :, slot : slot + gap]
            own.values[:, :, :, at : at + gap] = whole.values[:, :, :, slot : slot + gap]
            if run is not None:
                if gap:
                    runs.append(Run(own, at, at + gap, slot))
                runs.append(run)
                slot = run.slot + len(run)
                at += gap
        return RowKV(own, count, runs, begin=at)


def _buffers(rows: Sequence[Row]) -> dict[int, KVBuffer]:
    """What they refer to, each once, by identity."""
    return {id(buffer): buffer for row in rows for buffer in row.kv.buffers()}


def _with_answer(row: Row, answer_ids: Sequence[int]) -> Row:
    """A finished row: where all of its prompt is exact, so is its answer."""
    if row.exact_length < len(row.ids):
        return row
    ids = np.concatenate([row.ids, np.asarray(answer_ids, dtype=np.int64)])[: row.kv.length]
    return Row(row.namespace, ids, row.kv, len(ids), {})


def _join(runs: list[Run], run: Run) -> None:
    """Add a run, to the last one if it goes on there."""
    last = runs[-1] if runs else None
    if last and last.buffer is run.buffer and last.shift == run.shift and last.end == run.begin:
        runs[-1] = Run(last.buffer, last.begin, run.end, last.slot)
    else:
        runs.append(run)


def _has_all(row: Row, old: Row) -> bool:
    """Whether a row begins with another."""
    return row.namespace == old.namespace and _common(row.ids, old.ids) == len(old.ids)


def _name(place: Placement, whole: KVBuffer) -> _Name:
    """The same for the same KV at the same positions."""
    kv = place.kv
    assert isinstance(kv, ModuleKV)
    return kv.values.data_ptr(), kv.seq_len, whole.position(place.begin) - kv.start


def _common(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> int:
    """Length of the common beginning."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count
