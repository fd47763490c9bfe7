"""Methods that ask the question which tokens matter to it.

The question is run over the stale KV first; the attention it pays to the reused tokens decides
which of them are recomputed. What such a method is, as a base class; knows no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, StaticSelector


@dataclass(frozen=True)
class QuestionSelector(StaticSelector, ABC):
    """Base: top-r of the reused tokens by a score taken from the question's attention.

    Attributes:
        recompute_ratio: share r of the reused tokens that is recomputed.
    """

    recompute_ratio: float = 0.15

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {self.recompute_ratio}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows, and with r = 1 all reused ones; otherwise `choose` adds to them."""
        return ~layout.exact if self.recompute_ratio == 1.0 else layout.fresh

    @abstractmethod
    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers whose attention `score` is shown, ascending; none if there is no choice."""

    @abstractmethod
    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """One layer's (question_len, seq_len) attention, mean over heads, to (seq_len,) scores."""

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """(observed_layers, seq_len) scores to the (seq_len,) bool rows to recompute."""
        total = scores.mean(dim=0)
        return top_rows(total, layout.reused.to(total.device), self.budget(layout))

    def budget(self, layout: Layout) -> int:
        """How many reused tokens are recomputed."""
        return int(self.recompute_ratio * int(layout.reused.sum()))

    def is_needed(self, layout: Layout) -> bool:
        """Whether there is something to choose."""
        return 0 < self.budget(layout) < int(layout.reused.sum())


def top_rows(scores: torch.Tensor, allowed: torch.Tensor, budget: int) -> torch.Tensor:
    """(seq_len,) bool: the `budget` allowed entries with the highest scores."""
    chosen = torch.zeros_like(allowed)
    chosen[scores.masked_fill(~allowed, float("-inf")).topk(budget).indices] = True
    return chosen
