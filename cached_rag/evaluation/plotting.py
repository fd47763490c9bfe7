"""Makes and saves matplotlib figures that can be read on white and on black. Knows no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cached_rag.errors import EvaluationError, needs_extra

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
