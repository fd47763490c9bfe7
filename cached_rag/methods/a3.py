"""A3: what the question attends to in the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import Layout, QuestionSelector


@dataclass(frozen=True)
class A3(QuestionSelector):
    """Recomputes the share r of the chunks' tokens that the question attends to in layer 0.

    The tokens that matter are those that this question needs, so the question is asked. In layer 0
    that costs nothing extra: its keys depend on no other token, so the cached ones are right
    already, and the question's own rows, which are computed anyway, make the choice.

    Paper: A3, Attention-Aware Accurate KV Cache Fusion (Zhou et al., 2025),
    https://arxiv.org/abs/2511.17560. In code that uses it all tokens run through layer 0 first;
    the choice is the same.

    Cost: the live tokens and r. Layer 0 sees words, not their meaning, and in our measurements the
    choice was hardly better than `random`'s (docs/experiments.md). Use it to compare.

    Attributes:
        recompute_ratio: r.
    """

    name: ClassVar[str] = "a3"

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layer 0."""
        return (0,) if self.is_needed(layout) else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """Sum over the question's tokens."""
        return weights.sum(dim=0)
