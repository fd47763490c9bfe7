"""ProphetKV: recompute what the question attends to, fused over all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.methods.base import Layout
from cached_rag.methods.question import QuestionSelector


@dataclass(frozen=True)
class ProphetKV(QuestionSelector):
    """Top-r by the question's attention, mean over its tokens, heads and all layers."""

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """All."""
        return tuple(range(layout.num_layers)) if self.is_needed(layout) else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """Mean over the question's tokens."""
        return weights.mean(dim=0)
