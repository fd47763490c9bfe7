"""Several methods at once: what any of them would recompute is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, Selector, StaticSelector
from cached_rag.methods.question import QuestionSelector


@dataclass(frozen=True)
class UnionSelector(QuestionSelector):
    """Union of methods' rows; at most one may ask the question, none may have check layers.

    Attributes:
        members: the methods; each has its own ratio, so there is none here.

    Raises:
        ConfigError: methods that cannot be joined, one that goes on with the answer, or a ratio.
    """

    recompute_ratio: float = 0.0
    members: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        transfers = any(m.transfers_drift for m in self.members)
        object.__setattr__(self, "transfers_drift", transfers)
        if self.recompute_ratio:
            raise ConfigError(
                "methods that are joined have ratios of their own, as in "
                "epic+prophetkv:recompute_ratio=0.05, and none for all of them"
            )
        asking = [m for m in self.members if isinstance(m, QuestionSelector)]
        if len(asking) > 1 or not all(isinstance(m, StaticSelector) for m in self.members):
            raise ConfigError(
                "only methods that choose their rows before the first layer can be joined, and at "
                "most one that asks the question (a3, infoflow, prophetkv)"
            )
        if any(getattr(m, "follow_tokens", 0) for m in self.members):
            raise ConfigError("a method that is joined with others has no follow_tokens")

    @property
    def _asking(self) -> QuestionSelector | None:
        return next((m for m in self.members if isinstance(m, QuestionSelector)), None)

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """All members' rows."""
        return reduce(torch.logical_or, (m.first_rows(layout) for m in self.members), layout.fresh)

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Those of the member that asks."""
        return self._asking.observed_layers(layout) if self._asking else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """That member's score."""
        assert self._asking is not None
        return self._asking.score(weights)

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """That member's rows, and the others'."""
        assert self._asking is not None
        others = self.first_rows(layout) & layout.reused
        return self._asking.choose(scores, layout) | others.to(scores.device)
