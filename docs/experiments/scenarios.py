"""What people ask of RAG, as prompts that every peer is given: streams, cold, one document, a chat.

They are made of question sets. The same ids go to all; which peer knows what of a prompt before it
comes is the difference between the scenarios. Knows peers as `docs/experiments/answers.py` has
them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from cached_rag.backends.prompt_text import Rendered
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.evaluation.timing import take_turns
from cached_rag.rag.answer import Prompts, Turn
from docs.experiments.answers import Peer, Question, Sample, agreement

_SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."
# Cold comes first: what it asks about must be new to all.
SCENARIOS = ("cold", "stream", "document", "chat")
# How many questions' chunks make the one document.
_DOCUMENT = 3
# Chunks, a question about them, and its answer.
Asked: TypeAlias = tuple[Sequence[str], str, str]


@dataclass(frozen=True)
class Scenario:
    """Prompts in the order in which they are asked; the first one is to warm up.

    Attributes:
        head: what all prompts begin with.
        texts: the chunks that peers may learn beforehand.
    """

    name: str
    head: Rendered
    texts: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class PeerRow:
    """One peer on one scenario.

    Attributes:
        prompt_tokens: median of the prompts.
        ttft_p50_ms: median milliseconds to the first token.
        ttft_p95_ms: the 95th percentile, as a time that was measured: of fewer than 20 questions,
            the slowest.
        total_ms: median milliseconds of a whole answer.
        tokens_per_s: median rate at which tokens come after the first.
        speedup: the first peer's total over this one's, median over the questions.
        spread: of that ratio, its upper quartile less its lower one.
        learn_s: seconds in which it learned the texts.
        pays_after: questions until that time is won back on whole answers, against `Peer.plain`, or
            the first peer if that was not asked; 0 if nothing was learned, None if never.
        agreement: share of an answer that is the first peer's, up to the first other token; mean.
    """

    scenario: str
    peer: str
    questions: int
    prompt_tokens: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    total_ms: float
    tokens_per_s: float
    speedup: float
    spread: float
    learn_s: float
    pays_after: int | None
    agreement: float


class Scenarios:
    """Makes scenarios for an engine's model, of sets of questions."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._prompts = engine, Prompts(engine, _SYSTEM)

    def named(self, kind: str, name: str, asked: Sequence[Asked]) -> Scenario:
        """The scenario of one of `SCENARIOS`.

        Args:
            name: of the question set.

        Raises:
            ConfigError: there is no such kind.
        """
        if kind not in SCENARIOS:
            raise ConfigError(f"there is no scenario {kind!r}; there are {', '.join(SCENARIOS)}")
        made: Scenario = getattr(self, kind)(name, asked)
        return made

    def stream(self, name: str, asked: Sequence[Asked]) -> Scenario:
        """Each question over its own chunks, which are known beforehand, as an index knows them."""
        texts = tuple(dict.fromkeys(text for chunks, _, _ in asked for text in chunks))
        return self._made(f"stream: {name}", texts, [self._one(*one) for one in asked])

    def cold(self, name: str, asked: Sequence[Asked]) -> Scenario:
        """As `stream`, and nothing is known before it is asked about."""
        return self._made(f"cold: {name}", (), [self._one(*one) for one in asked])

    def document(self, name: str, asked: Sequence[Asked]) -> Scenario:
        """The chunks of the first questions as one document, the same for each question."""
        texts = tuple(dict.fromkeys(t for chunks, _, _ in asked[:_DOCUMENT] for t in chunks))
        prompts = [self._prompts.messages(question, texts) for _, question, _ in asked]
        return self._made(f"one document: {name}", texts, prompts)

    def chat(self, name: str, asked: Sequence[Asked]) -> Scenario:
        """One chat over the first question's chunks: each prompt has all that was said before.

        The answers in the history are the set's, so that all peers are given the same ids.
        """
        texts, history, prompts = asked[0][0], list[Turn](), []
        for _, question, answer in asked:
            prompts.append(self._prompts.messages(question, texts, history))
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        return self._made(f"chat: {name}", tuple(texts), prompts)

    def _one(self, chunks: Sequence[str], question: str, _: str) -> list[Turn]:
        return self._prompts.messages(question, chunks)

    def _made(self, name: str, texts: tuple[str, ...], prompts: Sequence[list[Turn]]) -> Scenario:
        questions = []
        for messages in prompts:
            rendered = self._prompts.rendered(messages)
            tokens, _ = self._engine.plan(rendered, "full", Report("full"))
            questions.append(Question(rendered, tuple(tokens.ids)))
        return Scenario(name, self._prompts.head(), texts, tuple(questions))


def bench_scenario(
    peers: Mapping[str, Peer], scenario: Scenario, new_tokens: int = 64
) -> list[PeerRow]:
    """Let each peer learn a scenario's texts, and all of them take turns at its questions.

    Raises:
        ConfigError: there is no peer, or not one question after the first.
    """
    learned = {name: _seconds(partial(_learn, peer, scenario)) for name, peer in peers.items()}
    variants = {name: _asker(peer, scenario, new_tokens) for name, peer in peers.items()}
    found = take_turns(variants, len(scenario.questions) - 1)
    first = next(iter(found.values()))
    return [
        _row(scenario, name, learned[name], found, first, found.get(peer.plain, first))
        for name, peer in peers.items()
    ]


def _learn(peer: Peer, scenario: Scenario) -> None:
    if scenario.texts:
        peer.learn(scenario.texts, scenario.head)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _asker(peer: Peer, scenario: Scenario, new_tokens: int) -> Callable[[], Sample]:
    questions = iter(scenario.questions)

    def ask() -> Sample:
        sample = peer.answer(next(questions), new_tokens)
        peer.settle()
        return sample

    return ask


def _row(
    scenario: Scenario,
    name: str,
    learn_s: float,
    found: Mapping[str, Sequence[Sample]],
    first: Sequence[Sample],
    plain: Sequence[Sample],
) -> PeerRow:
    own = found[name]
    waits = [sample.ttft_ms for sample in own]
    pairs = list(zip(own, first, strict=True))
    ratios = [theirs.total_ms / mine.total_ms for mine, theirs in pairs]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    won_s = statistics.fmean(a.total_ms - b.total_ms for a, b in zip(plain, own, strict=True)) / 1e3
    learn_s = learn_s if scenario.texts else 0.0
    return PeerRow(
        scenario=scenario.name,
        peer=name,
        questions=len(own),
        prompt_tokens=round(statistics.median(len(q.ids) for q in scenario.questions[1:])),
        ttft_p50_ms=statistics.median(waits),
        ttft_p95_ms=float(np.percentile(waits, 95, method="higher")),
        total_ms=statistics.median(sample.total_ms for sample in own),
        tokens_per_s=1000 / statistics.median(sample.token_ms for sample in own),
        speedup=float(middle),
        spread=float(high - low),
        learn_s=learn_s,
        pays_after=pays_after(learn_s, won_s),
        agreement=statistics.fmean(agreement(*pair) for pair in pairs),
    )


def pays_after(learn_s: float, won_s: float) -> int | None:
    """Questions until seconds of learning are won back; 0 for nothing to win back, None: never."""
    if learn_s < 0.01:  # it did nothing
        return 0
    return None if won_s <= 0 else int(np.ceil(learn_s / won_s))
