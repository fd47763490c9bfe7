"""Methods that look at no attention: all cached KV as it is, what is exact, none, what chunks do to
states; each chunk's first tokens; and a choice by chance, with which the others are compared.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import Layout, Selector, Takes, top_rows
from cached_rag.options import check_range


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
class Compose(Reuse):
    """Recomputes twelve tokens of each chunk, in models whose layers keep states: an experiment.

    In a gated delta net or Mamba 2 a chunk's tokens take a state S to M S + B, and M and B are kept
    with its KV. So the states behind a chunk are a product, whatever stands before it. The first
    eight tokens, as anchors, and the last four, which may be others in a prompt, are computed.

    Paper: none, it is ours. The layers' equations are Mamba 2's (Dao and Gu, 2024,
    https://arxiv.org/abs/2405.21060) and Gated DeltaNet's (Yang et al., 2024,
    https://arxiv.org/abs/2412.06464). Nobody has measured what it does to a trained model's
    answers, so no default uses it.

    Cost: the live tokens and twelve of each chunk. Use it to try it, with chunks that were encoded
    with `StoreConfig.composes`.
    """

    name: ClassVar[str] = "compose"
    composes: ClassVar[bool] = True
    repairs: ClassVar[bool] = True


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
        super().__post_init__()
        check_range(self, -(1 << 63), (1 << 63) - 1, "seed")  # as PyTorch has it

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the drawn ones."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(layout.fresh.shape, generator=generator)
        budget = int(self.recompute_ratio * int(layout.reused.sum()))
        return layout.fresh | top_rows(scores, layout.reused, budget)


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
        super().__post_init__()
        check_range(self, 0, math.inf, "anchor_tokens")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors."""
        rows = layout.fresh.clone()
        ratio = self.recompute_ratio
        for begin, end in layout.modules:
            count = self.anchor_tokens if ratio is None else round(ratio * (end - begin))
            rows[begin : min(end, begin + count)] = True
        return rows
