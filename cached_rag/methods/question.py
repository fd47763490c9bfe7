"""Methods that ask the question: what it attends to is recomputed.

They differ in the layers that they look at, and in how they weigh what each of the question's
tokens attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
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
