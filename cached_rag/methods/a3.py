"""A3: recompute what the question attends to in the first layer.

As coded by its users, all tokens run through layer 0 first. Keys of layer 0 depend on no other
token, so the cached ones are right already, and the same choice comes from the question's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.methods.base import Layout
from cached_rag.methods.question import QuestionSelector


@dataclass(frozen=True)
class A3(QuestionSelector):
    """Top-r by the question's attention in layer 0, summed over its tokens and heads."""

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layer 0."""
        return (0,) if self.is_needed(layout) else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """Sum over the question's tokens."""
        return weights.sum(dim=0)
