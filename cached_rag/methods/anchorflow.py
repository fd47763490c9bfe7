"""AnchorFlow: anchors, the question's choice, and drift. What `auto` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, top_rows
from cached_rag.methods.epic import Epic
from cached_rag.methods.infoflow import InfoFlow


@dataclass(frozen=True)
class AnchorFlow(InfoFlow):
    """Recomputes the first tokens of every chunk, and of the rest what the question attends to.

    The first tokens mend what being encoded apart did to a chunk (`epic`), the others are those
    that this question needs (`infoflow`). The tokens that are not recomputed are moved as the
    recomputed ones of their chunk were on average (drift), which costs nothing.

    Paper: none, it is ours, made of EPIC, https://arxiv.org/abs/2410.15332, and InfoFlow KV,
    https://arxiv.org/abs/2603.05353. With chunks encoded behind a primer it came nearest to full
    prefill at the least recompute (docs/experiments.md).

    Cost: the live tokens twice, the anchors and r. Use it by its name, instead of `auto`, to set
    its options, or where a model that cannot do it should be an error.

    Attributes:
        recompute_ratio: share r of the reused tokens that the question chooses.
        anchor_tokens: how many of each chunk's first tokens come with them.
        transfers_drift: whether the tokens not recomputed are moved as the recomputed ones are.
        follow_tokens: so many of the answer's first tokens choose, too, before the next one is
            picked (`engine/repair.py`). Not for prompts with gaps.
        follow_ratio: share of the reused tokens that each of them chooses.
    """

    name: ClassVar[str] = "anchorflow"

    recompute_ratio: float = 0.15
    anchor_tokens: int = 8
    transfers_drift: bool = True
    follow_tokens: int = 0
    follow_ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_tokens < 0:
            raise ConfigError(f"anchor_tokens cannot be negative: {self.anchor_tokens}")
        if not 0 <= self.follow_tokens <= 64:
            raise ConfigError(f"follow_tokens is a number from 0 to 64, not {self.follow_tokens}")
        if not 0.0 <= self.follow_ratio <= 1.0:
            raise ConfigError(f"follow_ratio is a share, 0 to 1, not {self.follow_ratio}")

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
