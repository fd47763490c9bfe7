"""Makes a table of measurements: means, paired differences to full prefill, median times.

Knows numbers; knows no model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from cached_rag.evaluation.metrics import bootstrap, bootstrap_ratio

# With fewer questions than this, a set shows large differences only.
SMALL = 30
# Name of the row over all data sets.
POOLED = "all"
Row = dict[str, Any]


def summarise(measurements: Iterable[Row], wanted: Iterable[tuple[str, float]]) -> list[Row]:
    """One row per data set and `wanted` (method, ratio) pair, in that order.

    With several data sets, the questions of all are one more set, `POOLED`. An example counts only
    if `full` was measured on it, too. Intervals are 95 % bootstrap intervals of paired differences.
    """
    groups: dict[tuple[str, str, float], dict[str, Row]] = {}
    kept = list(measurements)
    if len({row["data"] for row in kept}) > 1:
        kept += [row | {"data": POOLED, "example": (row["data"], _name(row))} for row in kept]
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


def _name(row: Row) -> Any:
    """What tells a question from others: its digest, as several may have the same id."""
    return row.get("example", row["id"])


def _row(data: str, method: str, ratio: float, found: dict[str, Row], full: dict[str, Row]) -> Row:
    ids = [name for name in found if name in full]
    own, base = [found[i] for i in ids], [full[i] for i in ids]
    nll, f1 = _difference(own, base, "nll"), _difference(own, base, "f1")
    right = [(a, b) for a, b in zip(own, base, strict=True) if b["f1"] and b["f1"] >= 0.5]
    pairs = [(a["f1"], b["f1"]) for a, b in right]
    kept = bootstrap_ratio(pairs) if pairs else None
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
        "f1_kept": None if kept is None else round(kept.mean, 5),
        "f1_kept_ci": None if kept is None else [round(kept.low, 5), round(kept.high, 5)],
        "full_is_right": len(right),
        **{name: _mean(own, name) for name in ("kl", "kl_along", "entropy")},
        **{name: _mean(own, name) for name in ("agreement", "charged_recompute")},
        "ttft_ms": round(statistics.median(row["ttft_ms"] for row in own), 2),
        "speedup": round(statistics.median(speedups), 3),
        "small": len(ids) < SMALL,
    }


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return round(statistics.fmean(values), 5) if values else None


def _difference(
    own: Sequence[Row], base: Sequence[Row], name: str
) -> tuple[float | None, list[float] | None]:
    pairs = zip(own, base, strict=True)
    found = [a[name] - b[name] for a, b in pairs if None not in (a[name], b[name])]
    if not found:
        return None, None
    interval = bootstrap(found)
    return round(interval.mean, 5), [round(interval.low, 5), round(interval.high, 5)]
