"""Draws `peers`: whole answers of every peer, a panel a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cached_rag.evaluation.summary import ACCENT, INK, new_figure, save
from docs.experiments.scenarios import PeerRow

_OWN = ("full", "prefix", "auto", "fast")


def plot_peers(rows: Sequence[PeerRow], path: Path) -> None:
    """Bars of median seconds: to the first token dark, from there to the last one light.

    Raises:
        MissingPackageError: matplotlib is not installed.
        EvaluationError: the file cannot be written, or matplotlib does not know the format.
    """
    panels = list(dict.fromkeys(row.scenario for row in rows))
    peers = list(dict.fromkeys(row.peer for row in rows))
    height = 0.9 + len(panels) * (0.5 + 0.22 * len(peers))
    figure, axes = new_figure(height, len(panels))
    for scenario, ax in zip(panels, axes if len(panels) > 1 else [axes], strict=True):
        found = [row for row in rows if row.scenario == scenario][::-1]
        for at, row in enumerate(found):
            colour = ACCENT if row.peer.partition("@")[0] in _OWN else INK
            first, rest = row.ttft_p50_ms / 1000, (row.total_ms - row.ttft_p50_ms) / 1000
            ax.barh(at, first, color=colour, height=0.7)
            ax.barh(at, rest, left=first, color=colour, height=0.7, alpha=0.35)
            ax.text(
                row.total_ms / 1000, at, f"  {row.total_ms / 1000:.1f} s", va="center", color=INK
            )
        ax.set_yticks(range(len(found)), [row.peer for row in found])
        ax.set_title(f"{scenario}, {found[0].prompt_tokens} tokens", loc="left")
        ax.margins(x=0.12)
    ax.set_xlabel("seconds: to the first token (dark), of the whole answer")
    save(figure, path)
