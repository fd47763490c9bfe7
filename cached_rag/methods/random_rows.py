"""Random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, Selector, top_rows


@dataclass(frozen=True)
class Random(Selector):
    """Recomputes a share r of the chunks' tokens, drawn by chance, the same ones every time.

    It is what every other choice has to beat at the same cost.

    Paper: none.

    Cost: the live tokens and r. Use it in evaluations and benchmarks, not for answers.

    Attributes:
        recompute_ratio: r.
        seed: of the draw.
    """

    name: ClassVar[str] = "random"

    recompute_ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {self.recompute_ratio}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the drawn ones."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(layout.fresh.shape, generator=generator)
        budget = int(self.recompute_ratio * int(layout.reused.sum()))
        return layout.fresh | top_rows(scores, layout.reused, budget)
