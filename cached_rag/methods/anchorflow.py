"""AnchorFlow: anchors, the question's choice, and drift; `auto`, the default; and `fast`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, top_rows
from cached_rag.methods.epic import Epic
from cached_rag.methods.question import InfoFlow

# Asking computes the live tokens once more. It is left out where they are more than this share of
# the prompt, and more than this number of tokens: there it costs more than all the rest, and
# brought nothing at 3 % (docs/quality.md, "Long questions, and prompts that are half known").
_LARGE_SHARE = 0.25
_MANY = 128


@dataclass(frozen=True)
class AnchorFlow(InfoFlow):
    """Recomputes the first tokens of every chunk, and of the rest what the question attends to.

    The first tokens mend what being encoded apart did to a chunk (`epic`), the others are those
    that this question needs (`infoflow`). The tokens that are not recomputed are moved as the
    recomputed ones of their chunk were on average (drift), which costs nothing.

    Paper: none, it is ours, made of EPIC, https://arxiv.org/abs/2410.15332, and InfoFlow KV,
    https://arxiv.org/abs/2603.05353. With chunks encoded behind a primer it came nearest to full
    prefill at the least recompute (docs/experiments.md).

    Cost: the live tokens twice, the anchors and r. Use it by its name, instead of `auto`, to set
    its options, or where a model that cannot do it should be an error.

    Attributes:
        recompute_ratio: share r of the reused tokens that the question chooses.
        anchor_tokens: how many of each chunk's first tokens come with them.
        transfers_drift: whether the tokens not recomputed are moved as the recomputed ones are.
        follow_tokens: so many of the answer's first tokens choose, too, before the next one is
            picked (`engine/repair.py`). Not for prompts with gaps.
        follow_ratio: share of the reused tokens that each of them chooses.
    """

    name: ClassVar[str] = "anchorflow"

    recompute_ratio: float = 0.3
    anchor_tokens: int = 8
    transfers_drift: bool = True
    follow_tokens: int = 0
    follow_ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_tokens < 0:
            raise ConfigError(f"anchor_tokens cannot be negative: {self.anchor_tokens}")
        if not 0 <= self.follow_tokens <= 64:
            raise ConfigError(f"follow_tokens is a number from 0 to 64, not {self.follow_tokens}")
        if not 0.0 <= self.follow_ratio <= 1.0:
            raise ConfigError(f"follow_ratio is a share, 0 to 1, not {self.follow_ratio}")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors; with r = 1 all reused ones."""
        return super().first_rows(layout) | self._anchors(layout)

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The anchors, and the highest mean scores among the rest."""
        anchors = self._anchors(layout)
        others = layout.reused & ~anchors
        budget = min(self.budget(layout), int(others.sum()))
        chosen = top_rows(scores.mean(dim=0), others.to(scores.device), budget)
        return chosen | anchors.to(scores.device)

    def _anchors(self, layout: Layout) -> torch.Tensor:
        return Epic(self.anchor_tokens).first_rows(layout) & layout.reused


@dataclass(frozen=True)
class Auto(AnchorFlow):
    """Recomputes what `anchorflow` does with its defaults: 8 anchors a chunk, and 30 %.

    Of chunks that were encoded behind others of their document it is 16 %. These shares are left
    out where the prompt's live tokens, a long question or chunks without KV, are a quarter of it
    and more than 128. Where a model's attention cannot be watched it is
    `epic:anchor_tokens=8+lexical`, and where keys cannot be moved `prefix` or `full`;
    `report.notes` says so. The figures that chose it are in docs/quality.md.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 16 to 30 %; with many live tokens these once, and
    the anchors. Use it unless you have measured another.
    """

    name: ClassVar[str] = "auto"
    # Chunks that were encoded behind others of their document are as near to full prefill with this
    # share of the ratio as others with all of it (docs/quality.md, "Behind their documents").
    settled_share: ClassVar[float] = 8 / 15
    gives_way: ClassVar[bool] = True

    def budget(self, layout: Layout) -> int:
        """How many reused tokens are recomputed besides the anchors."""
        settled = sum(int(layout.reused[begin:end].sum()) for begin, end in layout.settled)
        apart = int(layout.reused.sum()) - settled
        return int(self.recompute_ratio * (apart + self.settled_share * settled))

    def is_needed(self, layout: Layout) -> bool:
        """Whether the question is asked: not where that is dear."""
        live = int(layout.fresh.sum())
        is_dear = live > max(_MANY, _LARGE_SHARE * len(layout.fresh))
        return not is_dear and super().is_needed(layout)


@dataclass(frozen=True)
class Fast(Auto):
    """Recomputes what `auto` does, but 3 % in place of 30 % and 16 %.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 3 %. Use it for prose, of which a question needs no
    more than the gist, and not where entries are alike (docs/quality.md, "Alike entries").
    """

    name: ClassVar[str] = "fast"
    settled_share: ClassVar[float] = 1.0
    recompute_ratio: float = 0.03
