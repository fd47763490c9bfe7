"""How long a tenant waits over texts that another tenant has cached, and that nobody has."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from cached_rag import Engine, StoreConfig, load_model
from cached_rag.evaluation.summary import Interval, bootstrap
from cached_rag.evaluation.timing import make_texts

_TEXTS, _TOKENS = 3, 200


@dataclass(frozen=True)
class Waits:
    """Milliseconds to the first token.

    Attributes:
        difference: those of the other tenant over texts that the first has cached, less over texts
            that nobody has; an interval with 0 in it says that none can be told from the other.
        others: the median of the other tenant's.
        own: the median of the first tenant's, over its own texts.
    """

    difference: Interval
    others: float
    own: float


def waits(model: str, pairs: int) -> Waits:
    """Let a tenant ask so many times over texts of both kinds, in any order."""
    chance, differences = random.Random(0), []
    others, own = [], []
    store = StoreConfig(sequence_bytes=0, write_back=False, namespace="first")
    with Engine(load_model(model), store) as first, first.tenant("other") as other:
        texts = make_texts(first, *[_TOKENS] * (2 * pairs * _TEXTS + _TEXTS))
        groups = [texts[n : n + _TEXTS] for n in range(0, len(texts), _TEXTS)]
        _waited(other, groups.pop())  # to warm up
        for cached, unknown in zip(groups[::2], groups[1::2], strict=True):
            first.encode(cached, context=None)
            asked = [cached, unknown]
            chance.shuffle(asked)
            found = {group[0]: _waited(other, group) for group in asked}
            differences.append(found[cached[0]] - found[unknown[0]])
            others += found.values()
            own.append(_waited(first, cached))
    return Waits(bootstrap(differences), statistics.median(others), statistics.median(own))


def _waited(engine: Engine, texts: list[str]) -> float:
    prompt = "\n\n".join(texts) + "\n\nWhat is said here?"
    return engine.generate(prompt, max_tokens=1).report.ttft_ms
