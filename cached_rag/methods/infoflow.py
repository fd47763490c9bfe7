"""InfoFlow: what the question attends to in late layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, QuestionSelector


@dataclass(frozen=True)
class InfoFlow(QuestionSelector):
    """Recomputes the share r of the chunks' tokens that the question attends to in late layers.

    The question is run over the cached KV first, at the positions that the chunks have in this
    prompt. Attention of late layers knows what the question is about, and its norm over the
    question's tokens says through which tokens an answer would flow.

    Paper: InfoFlow KV (Teng et al., 2026), section 3, https://arxiv.org/abs/2603.05353. It names
    layers by number; here they are the last half.

    Cost: the live tokens twice, and r. Use it with a ratio of 10 to 30 % where nearness to full
    prefill counts more than time.

    Attributes:
        recompute_ratio: r.
        depth: where the observed layers begin, as a share of all; they go on to the last.
    """

    name: ClassVar[str] = "infoflow"

    depth: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.depth < 1.0:
            raise ConfigError(f"depth is a share of the layers, 0 to below 1, not {self.depth}")

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """The late ones."""
        first = int(self.depth * layout.num_layers)
        return tuple(range(first, layout.num_layers)) if self.is_needed(layout) else ()

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """Euclidean norm over the question's tokens."""
        return weights.square().sum(dim=0).sqrt()
