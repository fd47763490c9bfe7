"""What measurements show: means, paired differences to full prefill with intervals, and a plot.

Knows numbers; knows no model.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cached_rag.errors import EvaluationError, needs_extra

# With fewer questions than this, a set shows large differences only.
SMALL = 30
# Name of the row over all data sets.
POOLED = "all"
Row = dict[str, Any]
_KIND = re.compile(r"([a-z]+)-\d")
_RESAMPLES = 10_000
# Of lines and letters; and of what is ours.
INK, ACCENT = "#8a8f98", "#0f9d8a"
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "legend.frameon": False,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "savefig.dpi": 144,
    "svg.hashsalt": "cached-rag",  # the same figures give the same file
}


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
        kept += [row | {"data": POOLED, "example": (row["data"], row["example"])} for row in kept]
    kept += _by_kind(measured)
    for row in kept:
        # By its digest, as several questions may have the same id.
        groups.setdefault((row["data"], row["method"], row["ratio"]), {})[row["example"]] = row
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


def _row(data: str, method: str, ratio: float, found: dict[str, Row], full: dict[str, Row]) -> Row:
    ids = [name for name in found if name in full]
    own, base = [found[i] for i in ids], [full[i] for i in ids]
    # Paired, as prompts of one set may be several times as long as those of another.
    speedups = [row["full_ttft_ms"] / row["ttft_ms"] for row in own]  # full's in the same run
    return {
        "method": method,
        "ratio": ratio,
        "data": data,
        "n": len(ids),
        **{name: _mean(own, name) for name in ("f1", "em", "rouge_l", "nll", "right")},
        **_difference(own, base, "nll"),
        **_difference(own, base, "f1"),
        **_difference(own, base, "right"),
        **_kept(own, base, "f1", 0.5, count="full_is_right"),
        **_kept(own, base, "right", 1.0, count="right_of"),
        **{n: _mean(own, n) for n in ("kl", "kl_along", "agreement", "charged_recompute")},
        "ttft_ms": round(statistics.median(row["ttft_ms"] for row in own), 2),
        "speedup": round(statistics.median(speedups), 3),
        "small": len(ids) < SMALL,
    }


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return round(statistics.fmean(values), 5) if values else None


def _kept(own: Sequence[Row], base: Sequence[Row], name: str, least: float, count: str) -> Row:
    """Share kept of `full`'s score where that is `least` or more, its interval, and how many."""
    pairs = zip(own, base, strict=True)
    found = [(a[name], b[name]) for a, b in pairs if (b.get(name) or 0.0) >= least]
    interval = bootstrap_ratio(found) if found else None
    return {**_shown(f"{name}_kept", interval), count: len(found)}


def _difference(own: Sequence[Row], base: Sequence[Row], name: str) -> Row:
    pairs = zip(own, base, strict=True)
    found = [a[name] - b[name] for a, b in pairs if None not in (a.get(name), b.get(name))]
    return _shown(f"{name}_diff", bootstrap(found) if found else None)


def _shown(name: str, of: Interval | None) -> Row:
    if of is None:
        return {name: None, f"{name}_ci": None}
    return {name: round(of.mean, 5), f"{name}_ci": [round(of.low, 5), round(of.high, 5)]}


@dataclass(frozen=True)
class Interval:
    """A mean, or a ratio, and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(differences: Sequence[float]) -> Interval:
    """Mean of paired differences with a 95 % bootstrap interval (percentiles); deterministic."""
    return bootstrap_ratio([(one, 1.0) for one in differences])


def bootstrap_ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Ratio of the sums of pairs, whose second is above 0, with an interval as `bootstrap`'s.

    All three are NaN where there are no pairs, as where no answer has a word.
    """
    values = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    draws = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    sums = values[draws].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    mine, its = values.sum(axis=0)
    return Interval(float(mine / its), float(low), float(high))


def plot_frontier(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw mean divergence over the data sets against TTFT as a share of full prefill's.

    Args:
        rows: from `summarise`.
        path: an image file; its suffix names the format.

    Raises:
        EvaluationError: matplotlib is missing, or does not know the format.
    """
    rows = [row for row in rows if row["data"] != POOLED and "/" not in row["data"]]  # no kinds
    figure, axes = new_figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted(_points([row for row in rows if row["method"] == method]))
        times, losses, _ = zip(*points, strict=True)
        axes.plot(times, losses, marker="o", label=method)
        for time, lost, ratio in points:
            axes.annotate(f"{ratio:g}", (time, lost), fontsize=7)
    axes.set(xlabel="TTFT / full prefill's TTFT", ylabel="kl against full prefill")
    axes.legend(fontsize=8)
    save(figure, path)


def _points(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """(time, divergence, ratio) of one method at each ratio, averaged over the data sets."""
    return [
        (
            statistics.fmean(1 / row["speedup"] for row in rows if row["ratio"] == ratio),
            statistics.fmean(row["kl"] or 0.0 for row in rows if row["ratio"] == ratio),
            ratio,
        )
        for ratio in dict.fromkeys(row["ratio"] for row in rows)
    ]


def new_figure(height: float = 5, panels: int = 1) -> tuple[Any, Any]:
    """A figure and its axes: one, or a list of several below each other.

    Args:
        height: in inches; figures are 8 inches wide.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs_extra("bench", "a plot"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.subplots(panels, squeeze=False)[:, 0].tolist()
    return figure, axes if panels > 1 else axes[0]


def save(figure: Any, path: Path) -> None:
    """Write a figure; the file's suffix says in which format.

    Raises:
        EvaluationError: it cannot be written, or matplotlib does not know the format.
    """
    import matplotlib

    try:
        with matplotlib.rc_context(_STYLE):
            figure.savefig(path)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot write the plot to {path}: {error}") from error
