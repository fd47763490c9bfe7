"""Which chunks are worth their place, where few are asked for often: Zipf's law, and its traces.

Of n chunks the i-th most popular is used with probability i^-s / H(n, s), where H is the sum of
i^-s over all of them (Zipf 1949; for the web: Breslau et al. 1999, s = .64 to .83). Knows no KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

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
        counted: those that were used most in the half of the trace before.
        known: those that are the most popular in truth, which is the most that can be had.
    """

    kept: float
    lru: float
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
    counts = np.bincount(trace[:half], minlength=chunks)
    ranked = np.argsort(-counts, kind="stable")
    rows = []
    for share in kept:
        size = max(1, round(share * chunks))
        is_kept = np.zeros(chunks, dtype=bool)
        is_kept[ranked[:size]] = True
        known = harmonic(size, exponent) / harmonic(chunks, exponent)
        counted = float(is_kept[trace[half:]].mean())
        rows.append(HitRow(share, lru_hits(trace, size, half), counted, known))
    return rows


def lru_hits(trace: NDArray[np.int64], size: int, warm: int) -> float:
    """Hit rate of a cache of the `size` chunks used last, from the use number `warm` on."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, chunk in enumerate(trace.tolist()):
        if chunk in cache:
            cache.move_to_end(chunk)
            hits += number >= warm
        else:
            cache[chunk] = None
            if len(cache) > size:
                cache.popitem(last=False)
    return hits / (len(trace) - warm)
