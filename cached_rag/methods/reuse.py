"""Reuse without a choice: of all cached KV, of what is exact, of none; and a choice by chance.

The others are compared with these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, Selector, Takes, top_rows


@dataclass(frozen=True)
class Reuse(Selector):
    """Recomputes nothing: only the live tokens are computed, all cached KV is taken as it is.

    Keys are moved to their positions. That chunks were read apart from each other stays as it is.

    Paper: Prompt Cache (Gim et al., MLSys 2024), sections 3.3 and 3.4,
    https://arxiv.org/abs/2311.04934. There modules have fixed positions; here they are moved.

    Cost: the live tokens, the least there is. Use it for modules of schemas, which are encoded
    behind what stands before them, for chunks that do not depend on each other, and where answers
    that are made at the same time shall share chunks.
    """

    name: ClassVar[str] = "reuse"
    repairs: ClassVar[bool] = False

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows."""
        return layout.fresh


@dataclass(frozen=True)
class Prefix(Reuse):
    """Recomputes all but the exact beginning: the prompt's head, and what was encoded behind it.

    What is taken is what full prefill would compute, so the answer is full prefill's.

    Paper: prefix caching as engines have it, such as RadixAttention (Zheng et al., 2023),
    https://arxiv.org/abs/2312.07104

    Cost: all that stands behind the beginning. Use it where answers must not change at all, and
    prompts begin alike: long system prompts, conversations.
    """

    name: ClassVar[str] = "prefix"
    takes: ClassVar[Takes] = Takes.EXACT


@dataclass(frozen=True)
class Full(Reuse):
    """Recomputes everything: full prefill, with which all others are compared.

    Paper: none. Cost: 1. Use it to see what another method changed, in time and in the answer.
    """

    name: ClassVar[str] = "full"
    takes: ClassVar[Takes] = Takes.NOTHING


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
