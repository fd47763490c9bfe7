"""A cache of the KV that finished prompts left, for prompts that begin as they did.

KV that is what full prefill computes serves every prompt, as far as the tokens are the same. KV
that a method repaired is marked with the method. It serves only prompts of the same method, and,
unless any may have it, only those that go on where the repaired prompt ended: the next turns of its
conversation. For it was repaired for that prompt's question.

Where a model's layers keep states, a prompt can go on only where a snapshot of them was taken: at
the end of a run, whose buffer has it.

What is kept may be written to disk, too, from where later processes bring it back.

Sequences with the same beginning share its KV. No buffer holds parts of two chunks. So when a chunk
is forgotten, its KV can be dropped with all KV behind it, which depends on it, while the KV before
it stays. Knows tokens and KV; knows no model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from cached_rag.config import KeepsRepaired
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.kept import least_worth
from cached_rag.kv.rows import RowKV, Run

_log = logging.getLogger(__name__)
# Fewest tokens of KV that are shared. Every shared run costs a kernel call in each layer,
# so shorter ones are copied instead.
MIN_SHARED = 128

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PromptKV:
    """The KV of a prompt, and maybe of its answer, from the first token on.

    Attributes:
        namespace: the tenant; tenants share nothing.
        ids: (seq_len,) int64, the tokens whose KV this is.
        runs: where the KV lies; each run is a whole buffer.
        exact_length: number of tokens, from the first, whose KV is what full prefill computes.
        repair: mark of the method that repaired the other tokens; empty if there are none.
        chunks: (digest, token after the last) of the chunks in it, in order.
        least: number of tokens, from the first, that a prompt needs to have in common with this
            one, before it may use those that are not exact.
        stops: where layers keep states, the ends of those runs that have them; a prompt can go on
            there only. Empty for anywhere.
    """

    namespace: str
    ids: Ids
    runs: tuple[Run, ...]
    exact_length: int
    repair: str = ""
    chunks: tuple[tuple[str, int], ...] = ()
    least: int = 0
    stops: tuple[int, ...] = ()

    def usable(self, ids: Ids, repair: str, exact: int = 0) -> int:
        """How many tokens of a prompt, from the first, may use this KV.

        Args:
            ids: the prompt's tokens.
            repair: mark of the method that will repair the prompt; empty for exact KV only.
            exact: how many of the tokens have to have exact KV.
        """
        length = common(ids, self.ids)
        may_be_repaired = bool(repair) and repair == self.repair and length >= self.least
        if not may_be_repaired or min(length, exact) > self.exact_length:
            length = min(length, self.exact_length)
        if not self.stops:
            return length
        return max((stop for stop in self.stops if stop <= length), default=0)

    def is_worth(self, length: int) -> bool:
        """Whether its first `length` tokens are worth keeping: many, or with a whole chunk."""
        return length >= MIN_SHARED or any(end <= length for _, end in self.chunks)

    def worth(self, ids: Ids, repair: str, exact: int) -> int:
        """As `usable`, but 0 if it is not worth it."""
        length = self.usable(ids, repair, exact)
        return length if self.is_worth(length) else 0

    def goes_on(self, old: PromptKV) -> bool:
        """Whether it goes on where an earlier prompt ended."""
        is_behind = self.namespace == old.namespace and len(self.ids) > len(old.ids)
        return is_behind and common(self.ids, old.ids) >= (old.least or len(old.ids))

    def supersedes(self, old: PromptKV) -> bool:
        """Whether it can serve all prompts that another one can."""
        is_same = self.namespace == old.namespace and self.exact_length >= old.exact_length
        is_as_open = self.least <= old.least or old.exact_length == len(old.ids)
        is_as_open = is_as_open and set(old.stops) <= set(self.stops)
        return is_same and is_as_open and self.usable(old.ids, old.repair) == len(old.ids)

    def cut(self, length: int) -> tuple[Run, ...]:
        """The runs of its first `length` tokens."""
        found = (run.cut(0, length) for run in self.runs)
        return tuple(run for run in found if run is not None)

    def piece(self, begin: int, end: int) -> ModuleKV | None:
        """KV of tokens `begin` to `end` (exclusive); None if it lies in more than one buffer."""
        for run in self.runs:
            part = run.cut(begin, end)
            if part is not None and len(part) == end - begin:
                return part.module(self.ids[begin:end].tolist())
        return None

    def until(self, slot: int) -> PromptKV:
        """The beginning of it, in those buffers that end at or before a slot; or at a stop."""
        stops = tuple(stop for stop in self.stops if stop <= slot)
        if self.stops:
            slot = max(stops, default=0)
        runs = tuple(run for run in self.runs if run.slot + len(run) <= slot)
        end = sum(map(len, runs))
        return replace(
            self,
            ids=self.ids[:end],
            runs=runs,
            exact_length=min(self.exact_length, end),
            chunks=tuple(chunk for chunk in self.chunks if chunk[1] <= end),
            stops=stops,
        )

    def find(self, text_digest: str, token_ids: Ids) -> int | None:
        """The first slot of a text in it, by its digest or by its tokens; None if it is not there.

        The slot may be earlier than the text's first token, but never later.
        """
        begins = (0, *(end for _, end in self.chunks))
        named = (
            b for b, (name, _) in zip(begins, self.chunks, strict=False) if name == text_digest
        )
        places = [*named, *where(self.ids, token_ids)]
        return min(places, default=None)


class Disk:
    """What is kept beyond memory: here nothing; `PromptArchive` keeps it on disk."""

    def prompts(self, namespace: str) -> list[PromptKV]:
        """A tenant's kept prompts, without their KV."""
        return []

    def bring(
        self, namespace: str, usable: Callable[[PromptKV], int], least: int
    ) -> PromptKV | None:
        """That of which more than `least` tokens are usable, and most, with its KV; or None."""

    def offer(self, prompt: PromptKV) -> None:
        """Write one later, in place of those that it supersedes."""

    def finish(self, prompts: Sequence[PromptKV], deadline: float) -> None:
        """Write these until then, the last one first, and nothing else later."""

    def withdraw(self, namespace: str, text_digest: str, token_ids: Ids) -> None:
        """Write none of those that wait and have a text."""


class Sequences:
    """The cache. What costs least to compute again is dropped first. Safe for several threads.

    Of KV of single tokens that is what was used longest ago; see `least_worth`.
    """

    def __init__(
        self, max_bytes: int, *, keeps_repaired: KeepsRepaired = True, disk: Disk | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            max_bytes: most bytes of KV; 0 keeps nothing.
            keeps_repaired: see `StoreConfig`.
            disk: where what is kept is written, too; None for nowhere.
        """
        self.max_bytes = max_bytes
        self.keeps_repaired = keeps_repaired
        self._disk = disk or Disk()
        self._kept: list[PromptKV] = []  # least recently used first
        # Of these, as much as was needed of some on disk.
        self._brought: WeakSet[PromptKV] = WeakSet()
        self._lock = threading.RLock()  # as in `Activity`
        self._has_told = False
        self._seen: dict[str, int] = {}  # by tenants that were left, see `leave`

    @property
    def nbytes(self) -> int:
        """Bytes of the KV that is kept; KV that sequences share counts once."""
        with self._lock:
            buffers = {id(run.buffer): run.buffer for one in self._kept for run in one.runs}
            return sum(buffer.nbytes for buffer in buffers.values())

    def clear(self) -> None:
        """Drop all sequences, of all tenants."""
        with self._lock:
            self._kept.clear()

    def leave(self, namespace: str, removals: int) -> None:
        """Note that `forget` may be called no more for a tenant who knows of so many removals."""
        self._seen[namespace] = removals

    def resume(self, namespace: str, removals: int) -> None:
        """Drop a tenant's sequences if there were removals since `leave`, of whichever texts."""
        with self._lock:
            if self._seen.pop(namespace, removals) != removals:
                self._kept = [one for one in self._kept if one.namespace != namespace]

    def beginning(
        self, namespace: str, ids: Ids, repair: str = "", exact: int = 0
    ) -> tuple[PromptKV | None, int]:
        """The sequence with the longest usable beginning of a prompt, and its number of tokens.

        Of equally long ones it is the one that is exact the farthest. Arguments as for
        `PromptKV.usable`.

        Returns:
            (None, 0) if there is nothing worth using.
        """
        with self._lock:
            best, most = None, (0, 0)
            for one in self._own(namespace):
                length = one.worth(ids, repair, exact)
                rank = (length, min(length, one.exact_length))
                if rank > most:
                    best, most = one, rank
            brought = self._disk.bring(
                namespace, lambda one: one.worth(ids, repair, exact), most[0]
            )
            length = 0 if brought is None else brought.usable(ids, repair, exact)
            if brought is not None and length > most[0]:
                best, most = brought, (length, 0)
                self._kept.append(brought)
                self._brought.add(brought)
            if best is not None:
                self._use(best)
                self._make_room(best)
            return best, most[0]

    def _own(self, namespace: str) -> list[PromptKV]:
        """A tenant's sequences in memory; under the lock."""
        return [one for one in self._kept if one.namespace == namespace]

    def _use(self, one: PromptKV) -> None:
        self._kept.remove(one)
        self._kept.append(one)

    def _make_room(self, used: PromptKV) -> None:
        """Drop sequences until the bound is kept to, and the one that is in use last."""
        while self._kept and self.nbytes > self.max_bytes:
            others = [one for one in self._kept if one is not used] or [used]
            self._kept.remove(others[least_worth([*map(_held, others)])])

    def branch(self, namespace: str, ids: Ids) -> int:
        """How many tokens a prompt has in common with the kept one that is most like it."""
        return max((common(ids, one.ids) for one in self._known(namespace)), default=0)

    def _known(self, namespace: str) -> list[PromptKV]:
        """A tenant's sequences, those on disk without their KV."""
        with self._lock:
            own = self._own(namespace)
        return [*self._disk.prompts(namespace), *own]

    def containing(self, namespace: str, token_ids: Ids) -> tuple[PromptKV, int] | None:
        """The last sequence with these tokens among its exact ones, and the slot of the first."""
        with self._lock:
            for one in reversed(self._own(namespace)):
                if found := where(one.ids[: one.exact_length], token_ids):
                    self._use(one)
                    return one, found[0]
        return None

    def add(self, sequence: PromptKV, kv: RowKV) -> None:
        """Keep a copy of a prompt's KV, as far as it may serve other prompts.

        Args:
            sequence: the description of this KV, without runs.
            kv: the KV.
        """
        if self.keeps_repaired is True:
            sequence = replace(sequence, least=0)
        keeps_all = self.keeps_repaired and sequence.repair and kv.length >= sequence.least
        length = kv.length if keeps_all else min(sequence.exact_length, kv.length)
        if snapshots := kv.own.snapshots:
            length = max((at for at in snapshots if at <= length), default=0)
        if kv.positions is not None or not sequence.is_worth(length):
            return
        rows = kv.own.keys.nbytes + kv.own.values.nbytes
        if not self._has_room(length * rows // kv.own.capacity):
            return
        with self._lock:
            kept = self._copied(sequence, kv, length)
            # The next turn of a conversation, and no other question behind the same head.
            goes_on = any(map(kept.goes_on, self._kept))
            self._kept = [one for one in self._kept if not kept.supersedes(one)] + [kept]
            self._make_room(kept)
        if goes_on:
            self._disk.offer(kept)

    def close(self, deadline: float) -> None:
        """Have all that is kept written to disk, but what was brought; see `Disk.finish`."""
        self._disk.finish([one for one in self._kept if one not in self._brought], deadline)

    def _has_room(self, nbytes: int) -> bool:
        """Whether a prompt may be kept; the first one that is too large is logged."""
        if nbytes > self.max_bytes > 0 and not self._has_told:
            self._has_told = True
            _log.warning(
                "a prompt and its answer have %d bytes of KV, and sequence_bytes is %d: nothing is "
                "kept of prompts so long, so the next turns of their chats begin anew; raise it",
                *(nbytes, self.max_bytes),
            )
        return nbytes <= self.max_bytes

    def _copied(self, sequence: PromptKV, kv: RowKV, length: int) -> PromptKV:
        """A sequence's first tokens: runs that are kept here already, and copies of the rest."""
        there, same = self.beginning(
            sequence.namespace, sequence.ids[:length], sequence.repair, sequence.exact_length
        )
        runs = list(there.until(same).runs) if there else []
        snapshots = kv.own.snapshots
        ends = {*(end for _, end in sequence.chunks if end < length), *snapshots, length}
        done = sum(map(len, runs))
        for end in sorted(end for end in ends if end <= length):
            if end > done:
                run = Run(kv.copy(done, end), 0, end - done, done)
                run.buffer.states = snapshots.get(end)
                runs.append(run)
                done = end
        stops = tuple(run.slot + len(run) for run in runs if run.buffer.states is not None)
        return replace(sequence, runs=tuple(runs), stops=stops).until(length)

    def order(self, namespace: str, names: Sequence[str]) -> list[int]:
        """Order chunks so that a prompt with them begins as a kept sequence does.

        If several chunks continue a sequence, the one that comes first in `names` is taken. Chunks
        that continue none keep their order, behind the others.

        Args:
            names: the chunks' digests.

        Returns:
            Indices into `names`.
        """
        known = {
            tuple(name for name, _ in one.chunks[:count])
            for one in self._known(namespace)
            for count in range(1, len(one.chunks) + 1)
        }
        taken: list[int] = []
        left = list(range(len(names)))
        path: tuple[str, ...] = ()
        while (step := next((i for i in left if (*path, names[i]) in known), None)) is not None:
            path = (*path, names[step])
            taken.append(step)
            left.remove(step)
        return [*taken, *left]

    def forget(self, namespace: str, text_digest: str, token_ids: Sequence[int]) -> None:
        """Drop the KV of a text, and of all that stood behind it, which depends on it.

        What is on disk of it stays there.

        Args:
            token_ids: tokens that every prompt with this text contains; empty if only the digest
                is to be looked for.
        """
        wanted = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            for one in self._own(namespace):
                slot = one.find(text_digest, wanted)
                if slot is None:
                    continue
                self._kept.remove(one)
                rest = one.until(slot)
                if len(rest.ids) < rest.least:  # so nobody may use what is not exact
                    rest = rest.until(rest.exact_length)
                if rest.runs and rest.is_worth(len(rest.ids)):
                    self._kept.insert(0, rest)
        self._disk.withdraw(namespace, text_digest, wanted)


def common(first: Ids, second: Ids) -> int:
    """Length of the common beginning."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count


def where(ids: Ids, wanted: Ids) -> list[int]:
    """All slots of `ids` at which `wanted` begins."""
    if not len(wanted) or len(wanted) > len(ids):
        return []
    places = np.flatnonzero(ids[: len(ids) - len(wanted) + 1] == wanted[0])
    return [int(at) for at in places if np.array_equal(ids[at : at + len(wanted)], wanted)]


def _held(one: PromptKV) -> dict[Hashable, tuple[int, int]]:
    """See `least_worth`."""
    return {id(run.buffer): (len(run), run.buffer.nbytes) for run in one.runs}
