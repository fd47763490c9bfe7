"""Methods that ask the question: what it attends to is recomputed, or what has its words.

They differ in the layers that they look at, in how they weigh what each of the question's tokens
attends to, and in what is recomputed besides. `auto`, the default, is one of them.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import Layout, QuestionSelector, Selector, top_rows
from cached_rag.methods.parse import UnionSelector
from cached_rag.methods.reuse import Epic
from cached_rag.options import check_range, require


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
        depth = self.depth
        require(0 <= depth < 1, f"depth is a share of the layers, 0 to below 1, not {depth}")

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


# Asking computes the live tokens once more. It is left out where they are more than this share of
# the prompt, and more than this number of tokens: there it costs more than all the rest, and
# brought nothing at 3 % (docs/experiments.md).
_LARGE_SHARE = 0.25
# Where a choice and what it chooses are this share of all that is reused, all of it is computed.
_NEARLY = 0.8
_MANY = 128
# A small model is misled by fewer alike tokens than `Layout.is_alike` takes, as in short lives of
# people, of which it is .16 to .45; of prose in so short prompts it is less (docs/experiments.md).
_PARTLY = 0.15
_SHORT = 1000


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
            picked (`engine/prompt.py`). Not for prompts with gaps.
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
        check_range(self, 0, math.inf, "anchor_tokens")
        check_range(self, 0, 64, "follow_tokens")
        check_range(self, 0, 1, "follow_ratio")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors; with r = 1 all reused ones."""
        return super().first_rows(layout) | self._anchors(layout)

    def followed(self, layout: Layout) -> int:
        """How many of the answer's first tokens choose, too."""
        return self.follow_tokens

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

    Of chunks that were encoded behind others of their document it is 16 %. Where chunks are full of
    alike entries it is 30 % of either, and more where these are more than 600 tokens: all, from
    1600 tokens on. Of keys and numbers it is more from 300 on, and all from 800 on. The first four
    tokens of an answer from either choose, too. Models of fewer than 10^9 weights, and those whose
    attention cannot be watched, compute all of alike entries, of keys and of numbers; of up to 1000
    tokens already where 15 % of them are in alike entries, and of up to 300 whatever they say.
    Otherwise these shares are left out where the prompt's live tokens, a long question or chunks
    without KV, are a quarter of it and more than 128. Where a model's attention cannot be watched
    it is `epic:anchor_tokens=8+lexical`, and where keys cannot be moved `prefix` or `full`;
    `report.notes` says so. The figures that chose it are in docs/quality.md.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 16 to 30 %; with many live tokens these once, and
    the anchors; with many alike entries up to a full prefill, and 1 % with each token that
    chooses. Use it unless you have measured another.
    """

    name: ClassVar[str] = "auto"
    # Where entries are alike, the ratio is enough for so many tokens; of keys and numbers, for half
    # as many. The more there are, the more repair it takes until an answer is read from the right
    # entry (docs/experiments.md).
    enough_for: ClassVar[float] = 600
    # A model of fewer weights reads a neighbour's number more often than a larger one does, and
    # saves less time: of alike entries it computes all (docs/experiments.md).
    least_weights: ClassVar[float] = 1e9
    # Of so few tokens such a model computes all: there is little to gain (docs/experiments.md).
    few_tokens: ClassVar[int] = 300
    # Chunks that were encoded behind others of their document need less repair, unless their
    # entries are alike.
    settled_share: ClassVar[float] = 8 / 15
    # An answer begins in the right entry more often than it stays there: its first tokens look at
    # that entry, and what they look at is repaired before the next one is picked.
    alike_follow_tokens: ClassVar[int] = 4

    def share(self, layout: Layout) -> float:
        """The share of chunks encoded apart that is recomputed: r, or more if entries are alike.

        It is all where choosing would cost nearly as much.
        """
        reused, live = int(layout.reused.sum()), _live(layout)
        if self.takes_few(layout) or self._misleads(layout):
            return 1.0
        if reused <= self.enough_for / 2 or not layout.is_alike:
            return self.recompute_ratio
        enough = self.enough_for / 2 if layout.is_spelled else self.enough_for
        if reused <= enough:
            return self.recompute_ratio
        more = self.recompute_ratio * reused / enough
        return more if more * reused + live < _NEARLY * reused else 1.0

    def takes_few(self, layout: Layout) -> bool:
        """Whether the model is so small, and reuses so little, that all of it is computed."""
        reused = int(layout.reused.sum())
        return layout.num_weights < self.least_weights and 0 < reused <= self.few_tokens

    def _misleads(self, layout: Layout) -> bool:
        """Whether it would read some answers from the wrong entry: as small ones, or unwatched."""
        is_partly = int(layout.reused.sum()) <= _SHORT and layout.repeating > _PARTLY
        return layout.num_weights < self.least_weights and (is_partly or layout.is_alike)

    def unwatched(self) -> Selector:
        """What replaces it on models whose attention cannot be watched.

        It has as many anchors, and the ratio, if one was asked for. What the question's attention
        chooses elsewhere, its words do here (docs/llama_cpp.md).
        """
        ratio = self.recompute_ratio
        if ratio == type(self).recompute_ratio:
            # More than `Lexical`'s keeps no more answers (docs/experiments.md).
            ratio = min(ratio, Lexical.recompute_ratio)
        return UnionSelector(members=(Epic(self.anchor_tokens), Lexical(ratio)))

    def budget(self, layout: Layout) -> int:
        """How many reused tokens are recomputed besides the anchors."""
        settled = float(sum(int(layout.reused[begin:end].sum()) for begin, end in layout.settled))
        apart, share = int(layout.reused.sum()) - settled, self.share(layout)
        if settled and share < 1.0 and not layout.is_alike:
            settled *= self.settled_share
        return int(share * (apart + settled))

    def followed(self, layout: Layout) -> int:
        """How many of the answer's first tokens choose, too: more where entries are alike."""
        more = self.alike_follow_tokens if layout.is_alike else 0
        return max(self.follow_tokens, more)

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows and the anchors; all that are not exact if all are to be recomputed."""
        return ~layout.exact if self.share(layout) == 1.0 else super().first_rows(layout)

    def is_needed(self, layout: Layout) -> bool:
        """Whether the question is asked: not where that is dear."""
        live = _live(layout)
        is_dear = live > max(_MANY, _LARGE_SHARE * len(layout.fresh))
        is_raised = self.share(layout) > self.recompute_ratio
        return (is_raised or not is_dear) and super().is_needed(layout)


def _live(layout: Layout) -> int:
    """How many live tokens asking computes once more: those behind the first reused one.

    What stands before it may come from other prompts, and no answer is to depend on these.
    """
    return int((layout.fresh & (layout.reused.cumsum(0) > 0)).sum())


@dataclass(frozen=True)
class Fast(Auto):
    """Recomputes what `auto` does, but 3 % in place of 30 % and 16 %.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 3 %. Use it for prose, of which a question needs no
    more than the gist, and not where entries are alike (docs/quality.md, "Eleven sets").
    """

    name: ClassVar[str] = "fast"
    enough_for: ClassVar[float] = math.inf
    least_weights: ClassVar[float] = 0
    settled_share: ClassVar[float] = 1.0
    alike_follow_tokens: ClassVar[int] = 0
    recompute_ratio: float = 0.03


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
        super().__post_init__()
        check_range(self, 0, 1024, "reach")

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
