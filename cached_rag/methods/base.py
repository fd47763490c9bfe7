"""What a method decides: which rows are computed, layer by layer. Knows tensors; knows no model.

`QuestionSelector` is the base of those that run the question over the stale KV first, and choose by
the attention that it pays to the reused tokens.

To add a method: a file with a frozen dataclass that has these members, one line in the table of
`methods/__init__.py`, one row in docs/methods.md. The docstring of the class links its paper, and
says what it recomputes and why, what that costs, and when to use it.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from cached_rag.options import check_range, check_types


@dataclass(frozen=True)
class Layout:
    """How the prompt is covered, one entry a token.

    Attributes:
        fresh: (seq_len,) bool; without usable KV, as the question is. Always computed.
        exact: (seq_len,) bool; cached KV is what full prefill would compute. Never recomputed.
        modules: (begin, end) of the reused runs that are neither; their KV is approximate.
        num_layers: of the model.
        settled: those of `modules` that were encoded behind other chunks of their document, so that
            their KV needs less repair.
        ids: (seq_len,) int64; the prompt's tokens.
        first_attending: the first layer in which a token sees distant ones, so that only behind it
            approximate KV differs.
        num_weights: of the model; 0 if its attention cannot be watched, infinite where that does
            not matter.
    """

    fresh: torch.Tensor
    exact: torch.Tensor
    modules: tuple[tuple[int, int], ...]
    num_layers: int
    settled: tuple[tuple[int, int], ...] = ()
    ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    first_attending: int = 0
    num_weights: float = math.inf

    @property
    def reused(self) -> torch.Tensor:
        """(seq_len,) bool: approximate tokens, the ones a method may choose to recompute."""
        return ~(self.fresh | self.exact)

    @property
    def is_alike(self) -> bool:
        """Whether much of the reused tokens stands in entries that are alike.

        Such entries differ in a name or a number: what stands between comes again and again, in
        runs of `_TELLING` bits or more. Keys and numbers are alike by themselves.
        """
        return self.repeating > _MUCH or self.is_spelled

    @cached_property
    def is_spelled(self) -> bool:
        """Whether the reused tokens are few different ones in any order: keys or numbers."""
        is_few = _SPELLED[0] < self._bits < _SPELLED[1] and len(self._reused_ids) >= _ENOUGH
        return is_few and self.repeating <= _MUCH and float(self._once.float().mean()) > _MUCH

    @cached_property
    def repeating(self) -> float:
        """The share of reused tokens that stand in such runs, which come three times or more."""
        found = self._once & _again(self._reused_ids, self._telling, 3)
        return float(found.sum()) / max(1, len(found))

    @cached_property
    def _once(self) -> torch.Tensor:
        """(num_reused,) bool: what comes in no run twelve times as long as a telling one twice.

        Twice comes the overlap of two chunks, too.
        """
        return ~_again(self._reused_ids, 12 * self._telling, 2)

    @property
    def _telling(self) -> int:
        """How many tokens a run of `_TELLING` bits has."""
        return math.ceil(_TELLING / max(self._bits, 1e-3))

    @cached_property
    def _bits(self) -> float:
        """The entropy of a reused token."""
        counts = torch.unique(self._reused_ids, return_counts=True)[1]
        return float(torch.special.entr(counts / counts.sum()).sum()) / math.log(2)

    @property
    def _reused_ids(self) -> torch.Tensor:
        return self.ids[self.reused[: len(self.ids)]]

    @property
    def question(self) -> int:
        """Where the question begins: behind the last token that has cached KV."""
        covered = (~self.fresh).nonzero()
        return int(covered[-1]) + 1 if len(covered) else 0


# Bits of a run that does not come thrice by chance: some 4 tokens, more where a tokenizer spells.
_TELLING = 30
# Bits of a token in tables of keys or numbers; digits have 3.3, made entries 5.2 to 6.8, prose and
# code from 7 on, and so have texts of a few hundred tokens.
_SPELLED = (3.0, 5.0)
# A token of fewer has fewer bits, whatever the text is.
_ENOUGH = 300
# Of made entries, price lists and logs .4 to .9 of the tokens are alike, of code mostly .1 to .35,
# of prose up to .3 (docs/experiments.md).
_MUCH = 0.35


def _again(ids: torch.Tensor, length: int, times: int) -> torch.Tensor:
    """(num_tokens,) bool: what stands in a run of that length that comes so many times or more."""
    if len(ids) < length:
        return torch.zeros(len(ids), dtype=torch.bool)
    runs = ids.unfold(0, length, 1)
    named = torch.zeros_like(runs[:, 0])
    for token in runs.T:  # a hash, modulo 2^64
        named = named * 1_000_003 + token
    _, which, counts = torch.unique(named, return_inverse=True, return_counts=True)
    begins = (counts[which] >= times).float()
    around = F.pad(begins, (length - 1, length - 1))
    return F.max_pool1d(around[None], length, stride=1)[0] > 0


@dataclass(frozen=True)
class LayerCheck:
    """What is known at a check layer, for the rows computed so far.

    Attributes:
        layer: index of the layer.
        slots: (num_rows,) the rows' slots.
        reused: (num_rows,) bool; rows that may be dropped (the others are live).
        fresh_keys, cached_keys: (num_kv_heads, num_rows, head_dim), rotated for the rows' slots.
        fresh_values, cached_values: (num_kv_heads, num_rows, value_dim).
    """

    layer: int
    slots: torch.Tensor
    reused: torch.Tensor
    fresh_keys: torch.Tensor
    fresh_values: torch.Tensor
    cached_keys: torch.Tensor
    cached_values: torch.Tensor


class Takes(Enum):
    """Which of a prompt's cached KV a method uses: none, what is exact, or all."""

    NOTHING = "nothing"
    EXACT = "exact"
    ALL = "all"


class Selector(ABC):
    """A method. Pure: the same inputs give the same rows, nothing is kept.

    Attributes:
        name: by which users ask for it and reports call it.
        takes: which cached KV it uses.
        composes: whether it is for models whose layers keep states, which it puts together of what
            chunks do to them.
        repairs: whether KV that it takes may be computed again, so that others cannot share it.
        transfers_drift: whether a module's other tokens are moved as its recomputed ones are
            (`row_cache.py`).
        follow_tokens: so many of the answer's first tokens choose, too (`engine/prompt.py`).
    """

    name: ClassVar[str]
    takes: ClassVar[Takes] = Takes.ALL
    composes: ClassVar[bool] = False
    repairs: ClassVar[bool] = True
    transfers_drift: bool = False
    follow_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the types of a dataclass's options, and the `recompute_ratio` if it has one.

        Raises:
            ConfigError: one makes no sense.
        """
        check_types(self)
        if hasattr(self, "recompute_ratio"):
            check_range(self, 0, 1, "recompute_ratio")

    @abstractmethod
    def first_rows(self, layout: Layout) -> torch.Tensor:
        """(seq_len,) bool: rows computed in layer 0; must contain `layout.fresh`."""

    def check_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers before whose attention `narrow` is asked, ascending, each >= 1."""
        return ()

    def narrow(self, check: LayerCheck, layout: Layout) -> torch.Tensor:
        """(num_rows,) bool: rows to go on with; must contain the rows that are not reused."""
        return torch.ones_like(check.reused)


@dataclass(frozen=True)
class QuestionSelector(Selector):
    """Base: top-r of the reused tokens by a score taken from the question's attention.

    Attributes:
        recompute_ratio: share r of the reused tokens that is recomputed.
    """

    recompute_ratio: float = 0.15

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows, and with r = 1 all reused ones; otherwise `choose` adds to them."""
        return ~layout.exact if self.recompute_ratio == 1.0 else layout.fresh

    @abstractmethod
    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers whose attention `score` is shown, ascending; none if there is no choice."""

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """One layer's (question_len, seq_len) attention, mean over heads, to (seq_len,) scores.

        By default that is the mean over the question's tokens.
        """
        return weights.mean(dim=0)

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
