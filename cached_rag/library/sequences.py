"""KV that prompts left, for those to come that begin alike: one cache, under one bound.

What full prefill would have computed serves every prompt, token by token. What a method repaired is
marked with that method and serves only its own. Sequences with the same beginning share its KV. No
buffer holds parts of two chunks, so a chunk that is forgotten goes, with all that has read it, and
what stood before it stays. Knows tokens and KV; knows no model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cached_rag.kv.rows import RowKV, Run

# Each run that is read for itself costs a kernel call a layer; shorter ones are copied.
MIN_SHARED = 128

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PromptKV:
    """The KV of a prompt, and of what was answered, from its first token on.

    Attributes:
        namespace: its tenant's; tenants share nothing.
        ids: (seq_len,) tokens that it stands for.
        runs: where it lies, each run a whole buffer.
        exact_length: tokens from the first whose KV is what full prefill computes.
        repair: the method that repaired the others; empty if there are none.
        chunks: (digest, end) of the chunks in it, in order.
    """

    namespace: str
    ids: Ids
    runs: tuple[Run, ...]
    exact_length: int
    repair: str = ""
    chunks: tuple[tuple[str, int], ...] = ()

    def usable(self, ids: Ids, repair: str) -> int:
        """How many tokens of a prompt, from the first, may take their KV from here."""
        length = common(ids, self.ids)
        return length if repair and repair == self.repair else min(length, self.exact_length)

    def cut(self, length: int) -> tuple[Run, ...]:
        """The runs of its first tokens."""
        found = (run.cut(0, length) for run in self.runs)
        return tuple(run for run in found if run is not None)

    def until(self, slot: int) -> PromptKV:
        """As much of its beginning as lies in buffers without anything behind a slot."""
        runs = tuple(run for run in self.runs if run.slot + len(run) <= slot)
        end = sum(map(len, runs))
        return replace(
            self,
            ids=self.ids[:end],
            runs=runs,
            exact_length=min(self.exact_length, end),
            chunks=tuple(chunk for chunk in self.chunks if chunk[1] <= end),
        )

    def find(self, text_digest: str, token_ids: Ids) -> int | None:
        """Where a text begins in it, as a chunk or as any tokens; None if it does not."""
        begins = (0, *(end for _, end in self.chunks))
        named = (
            b for b, (name, _) in zip(begins, self.chunks, strict=False) if name == text_digest
        )
        places = [*named, *where(self.ids, token_ids)]
        return min(places, default=None)


class Sequences:
    """At most `max_bytes` of KV, least recently used sequences out first; 0 keeps nothing.

    Safe for several threads.
    """

    def __init__(self, max_bytes: int, *, keeps_repaired: bool = True) -> None:
        """Begin with nothing.

        Args:
            keeps_repaired: else only what is exact is kept, so that no answer depends on prompts
                that were asked before.
        """
        self.keeps_repaired = keeps_repaired
        self._max_bytes = max_bytes
        self._kept: list[PromptKV] = []  # least recently used first
        self._lock = threading.RLock()  # as in `WriteBack`

    @property
    def nbytes(self) -> int:
        """Bytes held now, what sequences share counted once."""
        with self._lock:
            return _nbytes(self._kept)

    def beginning(self, namespace: str, ids: Ids, repair: str = "") -> tuple[PromptKV | None, int]:
        """The sequence that has most of a prompt's beginning, and how many tokens of it.

        Args:
            repair: the method by which the prompt will be repaired; empty for what is exact.
        """
        with self._lock:
            best, most = None, 0
            for one in self._kept:
                length = one.usable(ids, repair) if one.namespace == namespace else 0
                if length > most and is_worth(length, one.chunks):
                    best, most = one, length
            if best is not None:
                self._kept.remove(best)
                self._kept.append(best)
            return best, most

    def add(self, sequence: PromptKV, kv: RowKV) -> None:
        """Keep a copy of a prompt's KV, as far as it may serve others.

        Args:
            sequence: what it stands for; it has no runs.
            kv: where it lies now.
        """
        length = min(sequence.exact_length, kv.length)
        if self.keeps_repaired and sequence.repair and sequence.chunks:
            length = max(length, sequence.chunks[-1][1])
        is_fit = kv.positions is None and is_worth(length, sequence.chunks)
        if not self._max_bytes or not is_fit:
            return
        with self._lock:
            kept = self._copied(sequence, kv, length)
            if _nbytes([kept]) > self._max_bytes:
                return
            self._kept = [one for one in self._kept if not _has_all(kept, one)] + [kept]
            while self.nbytes > self._max_bytes:
                self._kept.pop(0)

    def _copied(self, sequence: PromptKV, kv: RowKV, length: int) -> PromptKV:
        """The beginning of a sequence: what is here already, and copies of the rest."""
        there, same = self.beginning(sequence.namespace, sequence.ids[:length], sequence.repair)
        runs = list(there.until(same).runs) if there else []
        ends = sorted({*(end for _, end in sequence.chunks if end < length), length})
        done = sum(map(len, runs))
        for end in ends:
            if end > done:
                runs.append(Run(kv.copy(done, end), 0, end - done, done))
                done = end
        return replace(sequence, runs=tuple(runs)).until(length)

    def order(self, namespace: str, names: Sequence[str]) -> list[int]:
        """Indices of chunks so that they follow a known sequence as far as one goes.

        Where several go on, the chunk that comes first in `names` is taken; what is in no sequence
        keeps its order behind the others.

        Args:
            names: the chunks' digests.
        """
        with self._lock:
            known = {
                tuple(name for name, _ in one.chunks[:count])
                for one in self._kept
                if one.namespace == namespace
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
        """Drop the KV of a text, and of what stood behind it, for that has read it.

        Args:
            token_ids: tokens that every prompt has that contains it.
        """
        wanted = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            for one in list(self._kept):
                slot = one.find(text_digest, wanted) if one.namespace == namespace else None
                if slot is None:
                    continue
                self._kept.remove(one)
                if (rest := one.until(slot)).runs and is_worth(len(rest.ids), rest.chunks):
                    self._kept.insert(0, rest)


def is_worth(length: int, chunks: Iterable[tuple[str, int]]) -> bool:
    """Whether the first tokens of a prompt are worth keeping: a whole chunk, or many."""
    return length >= MIN_SHARED or any(end <= length for _, end in chunks)


def common(first: Ids, second: Ids) -> int:
    """Length of the common beginning."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count


def where(ids: Ids, wanted: Ids) -> list[int]:
    """Where `wanted` begins in `ids`."""
    if not len(wanted) or len(wanted) > len(ids):
        return []
    places = np.flatnonzero(ids[: len(ids) - len(wanted) + 1] == wanted[0])
    return [int(at) for at in places if np.array_equal(ids[at : at + len(wanted)], wanted)]


def _has_all(new: PromptKV, old: PromptKV) -> bool:
    """Whether one sequence makes another superfluous."""
    is_same = new.namespace == old.namespace and new.exact_length >= old.exact_length
    return is_same and new.usable(old.ids, old.repair) == len(old.ids)


def _nbytes(sequences: Iterable[PromptKV]) -> int:
    buffers = {id(run.buffer): run.buffer for one in sequences for run in one.runs}
    return sum(buffer.nbytes for buffer in buffers.values())
