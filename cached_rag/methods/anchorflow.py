"""Anchors, the question's choice and drift: EPIC's first tokens of every module, of the rest what
InfoFlow would take, and the others moved as those are.

Our own composition, and what `auto` is: with modules encoded behind a primer it came nearest to
full prefill at the least recompute (docs/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout
from cached_rag.methods.epic import Epic
from cached_rag.methods.infoflow import InfoFlow
from cached_rag.methods.question import top_rows


@dataclass(frozen=True)
class AnchorFlow(InfoFlow):
    """The first tokens of each module, and of the others those the question attends to.

    Attributes:
        recompute_ratio: share of the reused tokens that the question chooses.
        anchor_tokens: how many of each module's first tokens come with them.
        transfers_drift: whether the tokens not recomputed are moved as the recomputed ones are.
    """

    recompute_ratio: float = 0.03
    anchor_tokens: int = 8
    transfers_drift: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_tokens < 0:
            raise ConfigError(f"anchor_tokens cannot be negative: {self.anchor_tokens}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors; with r = 1 all reused ones."""
        return super().first_rows(layout) | self._anchors(layout)

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The anchors, and the highest mean scores among the rest."""
        anchors = self._anchors(layout)
        others = layout.reused & ~anchors
        budget = min(self.budget(layout), int(others.sum()))
        chosen = top_rows(scores.mean(dim=0), others.to(scores.device), budget)
        return chosen | anchors.to(scores.device)

    def _anchors(self, layout: Layout) -> torch.Tensor:
        return Epic(self.anchor_tokens).first_rows(layout) & layout.reused
