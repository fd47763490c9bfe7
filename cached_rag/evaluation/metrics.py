"""Scores of answers, and intervals of paired differences. Knows strings and numbers only.

F1 and EM (exact match) are those of SQuAD v1.1: texts are compared in lower case, without
punctuation and articles, and the best score over the references counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cached_rag.errors import needs_extra

with needs_extra("bench", "evaluation"):
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[^\W_]+")
_RESAMPLES = 10_000


def normalise(text: str) -> list[str]:
    """An answer's words, as SQuAD compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, else 0."""
    return float(any(normalise(answer) == normalise(reference) for reference in references))


def right(answer: str, references: Sequence[str]) -> float:
    """1 if one of the references stands in the answer, as whole words in any letter case, else 0.

    Numbers are compared as they are written: `70` stands neither in `1,705` nor in `2.70`.
    """
    found = " ".join(answer.casefold().split())
    wanted = (" ".join(reference.casefold().split()) for reference in references)
    return float(any(_stands_in(one, found) for one in wanted if one))


def _stands_in(wanted: str, text: str) -> bool:
    whole = rf"(?<!\w)(?<!\d[.,]){re.escape(wanted)}(?!\w)(?![.,]\d)"
    return re.search(whole, text) is not None


def f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, best over the references."""
    return max(_overlap(normalise(answer), normalise(reference)) for reference in references)


def _overlap(answer: list[str], reference: list[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    if not common:
        return 0.0
    return 2 * common / (len(answer) + len(reference))


class _Words:
    """Words as ROUGE's own tokenizer has them, and those with other letters than a to z whole."""

    def __init__(self) -> None:
        self._own = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """The words, those of ASCII stemmed."""
        words = _WORD.findall(text.lower())
        return [part for w in words for part in (self._own.tokenize(w) if w.isascii() else [w])]


_ROUGE = RougeScorer(["rougeL"], tokenizer=_Words())


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure, best over the references."""
    return float(max(_ROUGE.score(r, answer)["rougeL"].fmeasure for r in references))


@dataclass(frozen=True)
class Interval:
    """A mean, or a ratio, and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(differences: Sequence[float], seed: int = 0) -> Interval:
    """Mean of paired differences with a 95 % bootstrap interval (percentiles); deterministic."""
    values = np.asarray(differences, dtype=np.float64)
    low, high = np.quantile(values[_draws(len(values), seed)].mean(axis=1), (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def bootstrap_ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval:
    """Ratio of the sums of pairs, whose second is above 0, with an interval as `bootstrap`'s."""
    values = np.asarray(pairs, dtype=np.float64)
    sums = values[_draws(len(values), seed)].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    mine, its = values.sum(axis=0)
    return Interval(float(mine / its), float(low), float(high))


def _draws(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
