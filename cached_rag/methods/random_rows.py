"""Random tokens: what a method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, StaticSelector
from cached_rag.methods.question import top_rows


@dataclass(frozen=True)
class Random(StaticSelector):
    """A share of the reused tokens, drawn without replacement; the same every time.

    Attributes:
        recompute_ratio: the share.
        seed: of the draw.
    """

    recompute_ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {self.recompute_ratio}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the drawn ones."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(layout.live.shape, generator=generator)
        budget = int(self.recompute_ratio * int(layout.reused.sum()))
        return layout.live | top_rows(scores, layout.reused, budget)
