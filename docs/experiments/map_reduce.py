"""All chunks in one prompt, beside chains that ask about each chunk alone (CacheBlend, figure 13).

MapReduce summarises every chunk for the question, and answers from the summaries. MapRerank answers
from every chunk, and takes the answer of which the model is surest. LangChain has chains of these
names. A chunk is the beginning of its own prompt there, so its KV is reused exactly; prompts about
the chunks of one question run as a batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.decoding import Generation
from cached_rag.engine.engine import Engine
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import f1, right
from cached_rag.rag.answer import Prompts

CHAINS = ("mapreduce", "maprerank")
SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."
_SUMMARISE = "Summarise in one sentence what the document says about this: "
_SUMMARY_TOKENS = 48


@dataclass(frozen=True)
class ChainRow:
    """One way to ask, means over questions.

    Attributes:
        way: a method of this library, with all chunks in one prompt, or one of `CHAINS`.
        first_token_ms: median of the milliseconds until the answer's first token is known; with
            MapRerank that is when all answers are there.
        computed: (token, layer) pairs of all prompts that were computed, as a share of those of the
            one prompt.
    """

    way: str
    questions: int
    right: float
    f1: float
    first_token_ms: float
    computed: float


@dataclass(frozen=True)
class _Said:
    text: str
    first_token_ms: float
    computed: float


_Asks = Callable[[Example], _Said]


def bench_chains(
    model: Backend, examples: Sequence[Example], ways: Sequence[str], new_tokens: int = 32
) -> list[ChainRow]:
    """Ask every question in every way, the ways in turn; all chunks are encoded before."""
    with Engine(model, StoreConfig(sequence_bytes=0)) as engine:
        prompts = Prompts(engine, SYSTEM)
        engine.encode([chunk for one in examples for chunk in one.chunks], prompts.head())
        asks = {way: _way(prompts, way, new_tokens) for way in ways}
        for ask in asks.values():  # the first of anything takes longer
            ask(examples[0])
        said: dict[str, list[_Said]] = {way: [] for way in ways}
        for one in examples:
            for way, ask in asks.items():
                said[way].append(ask(one))
    return [_row(way, examples, found) for way, found in said.items()]


def _way(prompts: Prompts, way: str, new_tokens: int) -> _Asks:
    chain = _CHAINS.get(way)
    if chain is not None:
        return lambda one: chain(prompts, one, GenerationConfig("prefix", max_tokens=new_tokens))
    config = GenerationConfig(way, max_tokens=new_tokens)
    return lambda one: _said(_stuff(prompts, one.chunks, one, config))


def _map_reduce(prompts: Prompts, one: Example, config: GenerationConfig) -> _Said:
    asked = f"{_SUMMARISE}{one.question}"
    found, took = _each(prompts, asked, one, config.replace(max_tokens=_SUMMARY_TOKENS))
    last = _stuff(prompts, [summary.text.strip() for summary in found], one, config)
    computed = _computed([*found, last]) / _plain(prompts, one)
    return _Said(last.text, took + last.report.ttft_ms, computed)


def _map_rerank(prompts: Prompts, one: Example, config: GenerationConfig) -> _Said:
    """The paper's models rate their answers in words, which small ones cannot."""
    found, took = _each(prompts, one.question, one, config.replace(logprobs=0))
    best = max(found, key=_sureness)
    return _Said(best.text, took, _computed(found) / _plain(prompts, one))


_CHAINS: Mapping[str, Callable[[Prompts, Example, GenerationConfig], _Said]] = {
    "mapreduce": _map_reduce,
    "maprerank": _map_rerank,
}


def _each(
    prompts: Prompts, question: str, one: Example, config: GenerationConfig
) -> tuple[list[Generation], float]:
    """The answers from each chunk alone, and the milliseconds that all of them took."""
    chats = [prompts.rendered(prompts.messages(question, [chunk])) for chunk in one.chunks]
    started = time.perf_counter()
    found = prompts.engine.generate_batch(chats, config)
    return found, (time.perf_counter() - started) * 1000


def _stuff(
    prompts: Prompts, chunks: Sequence[str], one: Example, config: GenerationConfig
) -> Generation:
    chat = prompts.rendered(prompts.messages(one.question, chunks))
    return prompts.engine.generate(chat, config)


def _said(answer: Generation) -> _Said:
    report = answer.report
    return _Said(answer.text, report.ttft_ms, report.charged_recompute)


def _sureness(answer: Generation) -> float:
    """The mean log probability of an answer's tokens; an empty answer is the least sure."""
    return statistics.fmean([one.logprob for one in answer.logprobs] or [-math.inf])


def _computed(answers: Sequence[Generation]) -> float:
    """Tokens of the prompts that were computed, in tokens of all layers."""
    return sum(one.report.charged_recompute * one.report.prompt_tokens for one in answers)


def _plain(prompts: Prompts, one: Example) -> int:
    """Tokens of the one prompt with all chunks."""
    chat = prompts.rendered(prompts.messages(one.question, one.chunks))
    return prompts.engine.count_tokens(chat)


def _row(way: str, examples: Sequence[Example], said: Sequence[_Said]) -> ChainRow:
    pairs = list(zip(said, examples, strict=True))
    return ChainRow(
        way,
        len(said),
        statistics.fmean(right(one.text, asked.answers) for one, asked in pairs),
        statistics.fmean(f1(one.text, asked.answers) for one, asked in pairs),
        statistics.median(one.first_token_ms for one in said),
        statistics.fmean(one.computed for one in said),
    )
