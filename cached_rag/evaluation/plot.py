"""Plots quality lost against time to first token: one line per method, one point per ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cached_rag.evaluation.plotting import new_figure, save
from cached_rag.evaluation.summary import POOLED


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
