"""Lexical: what stands around the question's words in the chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, Selector, top_rows


@dataclass(frozen=True)
class Lexical(Selector):
    """Recomputes the tokens that stand nearest to the question's words in the chunks.

    A question names what it asks for: a part, a person, a code. Each of its tokens that stands in a
    chunk, too, is worth as much as it is rare among the reused tokens, and lends that to its
    neighbours, the less the further away they are. So a row of a table is recomputed with its name.
    Nothing is computed for the choice, and no attention is watched.

    Paper: none, it is ours; the worth of a rare word is Sparck Jones's (1972),
    https://doi.org/10.1108/eb026526.

    Cost: the live tokens, and r at most; less if few of the question's words stand in the chunks.
    Use it where attention cannot be watched, joined with anchors: `epic:anchor_tokens=8+lexical`
    is `auto` there. It does not see that other words mean the same.

    Attributes:
        recompute_ratio: share r of the reused tokens that is recomputed at most.
        reach: tokens on either side to which a word lends its worth.
    """

    name: ClassVar[str] = "lexical"

    recompute_ratio: float = 0.15
    reach: int = 16

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {self.recompute_ratio}")
        if not 0 <= self.reach <= 1024:
            raise ConfigError(f"reach is a number from 0 to 1024, not {self.reach}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows, and the reused ones nearest to the question's words."""
        if self.recompute_ratio == 1.0:
            return ~layout.exact
        scores = self.scores(layout)
        budget = int(self.recompute_ratio * int(layout.reused.sum()))
        budget = min(budget, int((layout.reused & (scores > 0)).sum()))
        return layout.fresh | top_rows(scores, layout.reused, budget)

    def scores(self, layout: Layout) -> torch.Tensor:
        """(seq_len,) what each token has of the question's words: 0 where none is near."""
        reused, ids = layout.reused, layout.ids
        words, places = torch.unique(ids, return_inverse=True)
        counts = torch.bincount(places[reused], minlength=len(words))
        rarity = (reused.sum() / counts.clamp(min=1)).log()
        worth = rarity * torch.isin(words, ids[layout.question :])
        near = 1 - torch.arange(-self.reach, self.reach + 1).abs() / (self.reach + 1)
        lent = torch.nn.functional.conv1d(
            (worth[places] * reused)[None], near[None, None], padding=self.reach
        )
        return lent[0]
