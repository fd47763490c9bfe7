"""EPIC: the first tokens of every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, Selector


@dataclass(frozen=True)
class Epic(Selector):
    """Recomputes the first tokens of every chunk, its anchors.

    Encoded apart, a chunk's first tokens take themselves for the beginning of a prompt and draw
    attention as such (attention sinks). Computed again behind what stands before them, they stop.
    A chunk that is exact where it stands is left alone.

    Paper: EPIC (Hu et al., ICML 2025), its algorithm LegoLink, https://arxiv.org/abs/2410.15332

    Cost: the live tokens and the anchors; the question is not asked. Use it where prompts are
    short, for there asking is dear, and where every millisecond counts more than nearness.

    Attributes:
        anchor_tokens: how many of each chunk's tokens.
        recompute_ratio: instead, a share of all reused tokens, spread evenly over the chunks.
    """

    name: ClassVar[str] = "epic"

    anchor_tokens: int = 16
    recompute_ratio: float | None = None

    def __post_init__(self) -> None:
        ratio = self.recompute_ratio
        if ratio is not None and not 0.0 <= ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {ratio}")
        if self.anchor_tokens < 0:
            raise ConfigError(f"anchor_tokens cannot be negative: {self.anchor_tokens}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors."""
        rows = layout.fresh.clone()
        ratio = self.recompute_ratio
        for begin, end in layout.modules:
            count = self.anchor_tokens if ratio is None else round(ratio * (end - begin))
            rows[begin : min(end, begin + count)] = True
        return rows
