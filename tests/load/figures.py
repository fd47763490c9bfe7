"""What a phase of load came to. Knows rows; knows no process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Row = Mapping[str, object]
# Refusals that are as they should be, if they say when to ask again.
_REFUSALS = (429, 503)


@dataclass(frozen=True)
class Watched:
    """The server, once a second.

    Attributes:
        rss: bytes of memory.
        waiting: requests in the queue.
    """

    rss: int
    files: int
    threads: int
    waiting: int


@dataclass(frozen=True)
class Phase:
    """One load for some time.

    Attributes:
        offered, answered: requests a second.
        refused: how many got 429 or 503 with Retry-After.
        failed: how many got anything else, or an answer that is not whole.
        first_ms, whole_ms: median, 95th and 99th percentile of the accepted.
        first: how the server was once the phase had begun; `last` at its end.
        most_waiting: the longest queue.
    """

    name: str
    offered: float
    answered: float
    refused: int
    failed: list[str]
    first_ms: tuple[float, float, float]
    whole_ms: tuple[float, float, float]
    first: Watched
    last: Watched
    most_waiting: int
    others: Counter[str]


def phase(name: str, seconds: float, rows: Sequence[Row], watched: Sequence[Watched]) -> Phase:
    """Sum a phase up."""
    asked = [row for row in rows if row["kind"] == "asked"]
    whole = [row for row in asked if row.get("is_whole")]
    refused = [row for row in asked if row["status"] in _REFUSALS and row.get("again")]
    others = Counter(f"{row['kind']} {row.get('status', '')}".strip() for row in rows)
    del others["asked 200"], others["asked 429"], others["asked 503"]
    return Phase(
        name,
        len(asked) / seconds,
        len(whole) / seconds,
        len(refused),
        [*_failures(asked), *_wrong(rows)],
        _percentiles([row["first"] for row in whole]),
        _percentiles([row["seconds"] for row in whole]),
        watched[len(watched) // 4],  # by then all clients are there
        watched[-1],
        max(one.waiting for one in watched),
        others,
    )


def _failures(asked: Sequence[Row]) -> list[str]:
    return [
        f"{row['status']} {row.get('error', '')}"
        for row in asked
        if not (row.get("is_whole") or (row["status"] in _REFUSALS and row.get("again")))
    ]


def _wrong(rows: Sequence[Row]) -> list[str]:
    """What should have been refused, and was not; 0 is a connection that was dropped."""
    return [
        f"{row['kind']}: {row['status']}"
        for row in rows
        if row["kind"] in ("nonsense", "too much")
        and row["status"] not in (0, 400, 404, 413, 422, *_REFUSALS)
    ]


def _percentiles(seconds: Sequence[object]) -> tuple[float, float, float]:
    found = np.array([one for one in seconds if one is not None] or [0.0], dtype=float)
    low, high, most = np.percentile(found * 1000, [50, 95, 99])
    return float(low), float(high), float(most)
