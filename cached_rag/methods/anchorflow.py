"""AnchorFlow: anchors, the question's choice, and drift. What `auto` is."""

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
        window: the question chooses so many neighbours at once; 1 for each token by itself.
        follow_tokens: so many of the answer's first tokens choose, too, before the next one is
            picked (`engine/following.py`). Not for prompts with gaps.
        follow_ratio: share of the reused tokens that each of them chooses.
    """

    recompute_ratio: float = 0.15
    anchor_tokens: int = 8
    transfers_drift: bool = True
    window: int = 1
    follow_tokens: int = 0
    follow_ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_tokens < 0:
            raise ConfigError(f"anchor_tokens cannot be negative: {self.anchor_tokens}")
        if self.window < 1:
            raise ConfigError(f"a window has a token at least, not {self.window}")
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
        scores = scores.mean(dim=0)
        if self.window == 1:
            chosen = top_rows(scores, others.to(scores.device), budget)
        else:
            chosen = self._windows(scores, layout, budget)
        return chosen | anchors.to(scores.device)

    def _windows(self, scores: torch.Tensor, layout: Layout, budget: int) -> torch.Tensor:
        """About `budget` tokens, one window at least: those with the highest mean scores."""
        runs = [
            (at, min(at + self.window, end))
            for begin, end in layout.modules
            for at in range(begin + self.anchor_tokens, end, self.window)
        ]
        runs.sort(key=lambda run: float(scores[slice(*run)].mean()), reverse=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for begin, end in runs[: max(1, round(budget / self.window))]:
            chosen[begin:end] = True
        return chosen

    def _anchors(self, layout: Layout) -> torch.Tensor:
        return Epic(self.anchor_tokens).first_rows(layout) & layout.reused
