"""Makes and saves matplotlib figures. Knows no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cached_rag.errors import EvaluationError, needs_extra


def new_figure() -> tuple[Any, Any]:
    """A figure and its axes.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs_extra("bench", "a plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Write a figure; the file's suffix says in which format.

    Raises:
        EvaluationError: it cannot be written, or matplotlib does not know the format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot write the plot to {path}: {error}") from error
