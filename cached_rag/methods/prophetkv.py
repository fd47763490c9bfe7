"""ProphetKV: what the question attends to, over all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import Layout, QuestionSelector


@dataclass(frozen=True)
class ProphetKV(QuestionSelector):
    """Recomputes the share r of the chunks' tokens that the question attends to in all layers.

    Tokens that stand out in general crowd out those that this question needs, so the question is
    run over the cached KV first, and its attention, averaged over tokens, heads and layers, makes
    one choice for all layers.

    Paper: ProphetKV (Wang et al., ICML 2026), its two stages, https://arxiv.org/abs/2602.02579

    Cost: the live tokens twice, and r. It does about what `infoflow` does, and took a little
    longer (docs/speed.md). Use it to compare, or joined with another: `epic+prophetkv`.

    Attributes:
        recompute_ratio: r; the paper's is 20 %.
    """

    name: ClassVar[str] = "prophetkv"

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """All."""
        return tuple(range(layout.num_layers)) if self.is_needed(layout) else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """Mean over the question's tokens."""
        return weights.mean(dim=0)
