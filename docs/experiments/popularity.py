"""Which chunks are worth their place, where few are asked for often: Zipf's law, and its traces.

Of n chunks the i-th most popular is used with probability i^-s / H(n, s), where H is the sum of
i^-s over all of them (Zipf 1949; for the web: Breslau et al. 1999, s = .64 to .83). What the
store would keep is asked of its own queues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cached_rag.kv.database import IN_MEMORY
from cached_rag.kv.entries import Entry, Listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Terms that are summed one by one; the rest is an integral, which is right to eight digits by then.
_SUMMED = 100_000


@dataclass(frozen=True)
class HitRow:
    """Share of uses that find the chunk, if only so many chunks are kept.

    Attributes:
        kept: share of the chunks that are kept.
        lru: those that were used last.
        store: what the store keeps.
        counted: those that were used most in the half of the trace before.
        known: those that are the most popular in truth, which is the most that can be had.
    """

    kept: float
    lru: float
    store: float
    counted: float
    known: float


def harmonic(count: int, exponent: float) -> float:
    """The sum of i^-exponent for i = 1 to count."""
    head = min(count, _SUMMED)
    total = float((np.arange(1, head + 1, dtype=np.float64) ** -exponent).sum())
    if count > head:  # Euler-Maclaurin, up to its second term
        ends = (head**-exponent - count**-exponent) / 2
        power = 1 - exponent
        area = np.log(count / head) if power == 0 else (count**power - head**power) / power
        total += float(area) - ends
    return total


def earning(chunks: int, uses: float, needed: float, exponent: float = 1.0) -> tuple[int, float]:
    """How many chunks are used `needed` times, of `uses` in all; and their share of all uses."""
    whole = harmonic(chunks, exponent)
    last = (uses / (whole * needed)) ** (1 / exponent)  # its i^-s * uses / H is just enough
    count = chunks if last >= chunks else int(last)
    return count, harmonic(count, exponent) / whole


def zipf_trace(chunks: int, uses: int, exponent: float = 1.0, seed: int = 0) -> NDArray[np.int64]:
    """(uses,) int64: which chunk each use is of, by rank from 0."""
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -exponent
    ends = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(ends, np.random.default_rng(seed).random(uses), side="right")
    return np.minimum(drawn, chunks - 1).astype(np.int64)


def hit_rates(
    trace: NDArray[np.int64], chunks: int, kept: Sequence[float], exponent: float = 1.0
) -> list[HitRow]:
    """Replay a trace: its first half makes the caches warm, its second half is counted."""
    half = len(trace) // 2
    asked = float((trace[half:] < chunks).mean())  # the others are used once
    counts = np.bincount(trace[:half], minlength=int(trace.max()) + 1)
    ranked = np.argsort(-counts, kind="stable")
    rows = []
    for share in kept:
        size = max(1, round(share * chunks))
        is_kept = np.zeros(len(counts), dtype=bool)
        is_kept[ranked[:size]] = True
        known = asked * harmonic(size, exponent) / harmonic(chunks, exponent)
        counted = float(is_kept[trace[half:]].mean())
        lru, store = (hits(trace, cache, half) for cache in (LRU(size), Stored(size)))
        rows.append(HitRow(share, lru, store, counted, known))
    return rows


class Cache(Protocol):
    """Keeps some chunks."""

    def use(self, chunk: int) -> bool:
        """Whether the chunk is there; it is kept if it is not."""


class LRU:
    """The chunks that were used last."""

    def __init__(self, size: int) -> None:
        self._size, self._kept = size, OrderedDict[int, None]()

    def use(self, chunk: int) -> bool:
        """See `Cache`."""
        is_there = chunk in self._kept
        self._kept[chunk] = None
        self._kept.move_to_end(chunk)
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return is_there


class Stored(Listed):
    """The chunks that the store keeps in memory."""

    def __init__(self, size: int) -> None:
        super().__init__(IN_MEMORY, "raw", size)

    def use(self, chunk: int) -> bool:
        """See `Cache`."""
        self.touch(str(chunk))
        is_there = self._entry(str(chunk)) is not None
        if not is_there:
            self._flush()
            with self._database.transaction():
                self._add(Entry(str(chunk), "raw", "", 1, ""))
        return is_there


def hits(trace: NDArray[np.int64], cache: Cache, warm: int) -> float:
    """Share of uses that find their chunk, from the use number `warm` on."""
    found = [cache.use(chunk) for chunk in trace.tolist()]
    return sum(found[warm:]) / (len(trace) - warm)


def moving(trace: NDArray[np.int64], chunks: int, uses: int = 5000) -> NDArray[np.int64]:
    """A trace in which after so many uses every chunk is as popular as one 97 ranks away was."""
    return (trace + np.arange(len(trace)) // uses * 97) % chunks


def with_ingestion(trace: NDArray[np.int64], chunks: int, every: int = 5000) -> NDArray[np.int64]:
    """A trace into which a fiftieth as many chunks come in now and then, used once."""
    parts = []
    for number, begin in enumerate(range(0, len(trace), every)):
        new = chunks + number * (chunks // 50)
        parts += [trace[begin : begin + every], np.arange(new, new + chunks // 50)]
    return np.concatenate(parts)
