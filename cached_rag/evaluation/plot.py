"""Plots quality lost against time to first token: one line per method, one point per ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cached_rag.errors import EvaluationError, needs_extra
from cached_rag.evaluation.summary import POOLED

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


def plot_frontier(rows: Sequence[dict[str, Any]], path: Path, loss: str = "kl") -> None:
    """Draw mean `loss` over the data sets against TTFT as a share of full prefill's.

    Args:
        rows: from `summarise`.
        path: an image file; its suffix names the format.
        loss: name of the figure to draw, e.g. "kl" or "nll_diff".

    Raises:
        EvaluationError: matplotlib is missing, or does not know the format.
    """
    rows = [row for row in rows if row["data"] != POOLED and "/" not in row["data"]]  # no kinds
    figure, axes = new_figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted(_points([row for row in rows if row["method"] == method], loss))
        times, losses, _ = zip(*points, strict=True)
        axes.plot(times, losses, marker="o", label=method)
        for time, lost, ratio in points:
            axes.annotate(f"{ratio:g}", (time, lost), fontsize=7)
    axes.set(xlabel="TTFT / full prefill's TTFT", ylabel=f"{loss} against full prefill")
    axes.legend(fontsize=8)
    save(figure, path)


def _points(rows: Sequence[dict[str, Any]], loss: str) -> list[tuple[float, float, float]]:
    """(time, loss, ratio) of one method at each ratio, averaged over the data sets."""
    return [
        (
            statistics.fmean(1 / row["speedup"] for row in rows if row["ratio"] == ratio),
            statistics.fmean(row[loss] or 0.0 for row in rows if row["ratio"] == ratio),
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
