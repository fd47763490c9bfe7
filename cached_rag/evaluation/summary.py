"""Makes a table of measurements: means, paired differences to full prefill, median times.

Knows numbers; knows no model.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from cached_rag.evaluation.metrics import bootstrap, bootstrap_ratio

# With fewer questions than this, a set shows large differences only.
SMALL = 30
# Name of the row over all data sets.
POOLED = "all"
Row = dict[str, Any]
_KIND = re.compile(r"([a-z]+)-\d")


def summarise(measurements: Iterable[Row], wanted: Iterable[tuple[str, float]]) -> list[Row]:
    """One row per data set and `wanted` (method, ratio) pair, in that order.

    With several data sets, the questions of all are one more set, `POOLED`. Where a set's ids begin
    with several kinds (`parts-11-0`), each kind is one more, `lookup/parts`. An example counts only
    if `full` was measured on it, too. Intervals are 95 % bootstrap intervals of paired differences.
    """
    groups: dict[tuple[str, str, float], dict[str, Row]] = {}
    measured = list(measurements)
    kept = list(measured)
    if len({row["data"] for row in kept}) > 1:
        kept += [row | {"data": POOLED, "example": (row["data"], _name(row))} for row in kept]
    kept += _by_kind(measured)
    for row in kept:
        groups.setdefault((row["data"], row["method"], row["ratio"]), {})[_name(row)] = row
    sets = dict.fromkeys(data for data, _, _ in groups)
    pairs = list(wanted)
    return [
        _row(data, method, ratio, groups[data, method, ratio], groups[data, "full", 1.0])
        for data in sets
        for method, ratio in pairs
        if (data, method, ratio) in groups and (data, "full", 1.0) in groups
    ]


def _by_kind(rows: Sequence[Row]) -> list[Row]:
    """Rows of the sets that have several kinds of question, each in a set of its kind."""
    found = [(row, kind[1]) for row in rows if (kind := _KIND.match(row["id"]))]
    kinds = Counter(data for data, _ in {(row["data"], kind) for row, kind in found})
    return [
        row | {"data": f"{row['data']}/{kind}"} for row, kind in found if kinds[row["data"]] > 1
    ]


def _name(row: Row) -> Any:
    """What tells a question from others: its digest, as several may have the same id."""
    return row.get("example", row["id"])


def _row(data: str, method: str, ratio: float, found: dict[str, Row], full: dict[str, Row]) -> Row:
    ids = [name for name in found if name in full]
    own, base = [found[i] for i in ids], [full[i] for i in ids]
    nll, f1 = _difference(own, base, "nll"), _difference(own, base, "f1")
    f1_kept = _kept(own, base, "f1", 0.5)
    right, right_kept = _difference(own, base, "right"), _kept(own, base, "right", 1.0)
    # Paired, as prompts of one set may be several times as long as those of another.
    speedups = [
        a.get("full_ttft_ms", b["ttft_ms"]) / a["ttft_ms"]  # full's in the same run
        for a, b in zip(own, base, strict=True)
    ]
    return {
        "method": method,
        "ratio": ratio,
        "data": data,
        "n": len(ids),
        **{name: _mean(own, name) for name in ("f1", "em", "rouge_l", "nll")},
        "nll_diff": nll[0],
        "nll_diff_ci": nll[1],
        "f1_diff": f1[0],
        "f1_diff_ci": f1[1],
        "f1_kept": f1_kept[0],
        "f1_kept_ci": f1_kept[1],
        "full_is_right": f1_kept[2],
        "right": _mean(own, "right"),
        "right_diff": right[0],
        "right_diff_ci": right[1],
        "right_kept": right_kept[0],
        "right_kept_ci": right_kept[1],
        "right_of": right_kept[2],
        **{name: _mean(own, name) for name in ("kl", "kl_along", "entropy")},
        **{name: _mean(own, name) for name in ("agreement", "charged_recompute")},
        "ttft_ms": round(statistics.median(row["ttft_ms"] for row in own), 2),
        "speedup": round(statistics.median(speedups), 3),
        "small": len(ids) < SMALL,
    }


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return round(statistics.fmean(values), 5) if values else None


def _kept(
    own: Sequence[Row], base: Sequence[Row], name: str, least: float
) -> tuple[float | None, list[float] | None, int]:
    """Share kept of `full`'s score where that is `least` or more, its interval, and how many."""
    pairs = zip(own, base, strict=True)
    found = [(a[name], b[name]) for a, b in pairs if (b.get(name) or 0.0) >= least]
    if not found:
        return None, None, 0
    kept = bootstrap_ratio(found)
    return round(kept.mean, 5), [round(kept.low, 5), round(kept.high, 5)], len(found)


def _difference(
    own: Sequence[Row], base: Sequence[Row], name: str
) -> tuple[float | None, list[float] | None]:
    pairs = zip(own, base, strict=True)
    found = [a[name] - b[name] for a, b in pairs if None not in (a.get(name), b.get(name))]
    if not found:
        return None, None
    interval = bootstrap(found)
    return round(interval.mean, 5), [round(interval.low, 5), round(interval.high, 5)]
