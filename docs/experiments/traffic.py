"""A stream of questions over chunks that many of them share: throughput and waiting time.

Several clients ask at the same time, each its next question as soon as it has an answer; or
requests arrive at random times (CacheBlend, figure 14). Answers end where the model ends them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cached_rag.backends.thread import submit
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.evaluation.timing import check_prompts_are_new
from cached_rag.rag.answer import Prompts
from docs.experiments.answers import Question, Sample, Stopwatch
from docs.experiments.peers.vllm import Vllm
from docs.experiments.serving import arriving

_SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."

# Answers one question; the number is how many of its prompt's tokens came from the cache, as far
# as that is known.
Answerer = Callable[[Question], Awaitable[tuple[Sample, int]]]


@dataclass(frozen=True)
class TrafficRow:
    """One method, or another program, on one stream of questions.

    Attributes:
        clients: how many asked at the same time; 0 where requests arrived at random times.
        rate: requests per second that arrived then, on average; else 0.
        speedup: `requests_per_s` over that of the first row.
        ttft_p50_ms, ttft_p95_ms: percentiles of the milliseconds from asking to the first token.
        gap_p50_ms, gap_p95_ms: percentiles of the milliseconds between the pieces of an answer,
            while other answers are made and other prompts come in; 0 if all have one piece only.
        answer_tokens: mean length of an answer.
        cached: share of all prompt tokens that came from the cache; 0 if the program does not say.
    """

    name: str
    method: str
    requests: int
    clients: int
    rate: float
    requests_per_s: float
    speedup: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    answer_tokens: float
    cached: float


def bench_traffic(
    engine: Engine,
    questions: Sequence[tuple[Sequence[str], str]],
    *,
    name: str = "",
    methods: Sequence[str] = ("full", "prefix", "auto"),
    clients: Sequence[int] = (4,),
    rates: Sequence[float] = (),
    new_tokens: int = 32,
    drafts: bool = True,
    vllm: Vllm | None = None,
) -> list[TrafficRow]:
    """Ask all questions with each method; encoding their chunks is not timed.

    Args:
        questions: (chunks, question) each.
        clients: how many ask at the same time; each method has a row for each number.
        rates: instead, requests per second that arrive (a Poisson process, the same for all).
        vllm: a server with the same model; it is asked, too, after the methods.

    Raises:
        ConfigError: the engine keeps finished prompts, so one method would find another's; or
            there is nobody who asks.
    """
    check_prompts_are_new(engine)
    if min(clients, default=0) < 1:
        raise ConfigError(f"clients are 1 at least, not {list(clients)}")
    texts = list(dict.fromkeys(chunk for chunks, _ in questions for chunk in chunks))
    asked = Prompts(engine, _SYSTEM)
    prompts = [_question(engine, asked, chunks, question) for chunks, question in questions]
    # In the model's thread, where requests are answered (see `backends/thread.py`).
    submit(partial(engine.encode, texts, asked.head(), context=engine.primer)).result()
    answerers: dict[str, Answerer] = {}
    for method in methods:
        config = GenerationConfig(
            method=method, max_tokens=new_tokens, drafts=drafts, repetition_penalty=1.0
        )
        answerers[method] = partial(_answer, engine, config)
    if vllm is not None:
        answerers["vllm"] = partial(_answer_by_vllm, vllm, new_tokens)
    rows: list[TrafficRow] = []
    for method, answer in answerers.items():
        asyncio.run(_stream(answer, prompts[:1], 1))  # to warm up
        for count, rate in [(0, rate) for rate in rates] or [(count, 0.0) for count in clients]:
            began = time.perf_counter()
            asking = arriving(map(answer, prompts), rate) if rates else None
            answers = asyncio.run(asking or _stream(answer, prompts, count))
            seconds = time.perf_counter() - began
            done = len(prompts) / seconds
            speedup = done / rows[0].requests_per_s if rows else 1.0
            total = sum(len(prompt.ids) for prompt in prompts)
            figures = _figures([sample for sample, _ in answers])
            cached = sum(count for _, count in answers) / total
            row = TrafficRow(
                name, method, len(prompts), count, rate, done, speedup, *figures, cached
            )
            rows.append(row)
    return rows


def drawn(
    questions: Sequence[tuple[Sequence[str], str]], chunks: int
) -> list[tuple[Sequence[str], str]]:
    """The same questions, each over as many chunks as before, drawn from the first few of all.

    So all requests share chunks, in ever other orders. The answer may not be among them.

    Args:
        chunks: how many chunks there are to draw from.

    Raises:
        ConfigError: a question has more chunks than that.
    """
    texts = list(dict.fromkeys(text for given, _ in questions for text in given))[:chunks]
    longest = max(len(given) for given, _ in questions)
    if longest > len(texts):
        raise ConfigError(f"a question has {longest} chunks, and there are {len(texts)} to share")
    chance = random.Random(0)
    return [(chance.sample(texts, len(given)), question) for given, question in questions]


def _question(engine: Engine, asked: Prompts, chunks: Sequence[str], question: str) -> Question:
    prompt = asked.rendered(asked.messages(question, chunks))
    tokens, _ = engine.plan(prompt, "auto", Report("auto"))
    return Question(prompt, tuple(tokens.ids))


def _figures(samples: Sequence[Sample]) -> tuple[float, float, float, float, float]:
    """A `TrafficRow`'s fields from `ttft_p50_ms` to `answer_tokens`."""
    ttft = np.percentile([sample.ttft_ms for sample in samples], [50, 95])
    gaps = [gap for sample in samples for gap in sample.gaps_ms]
    between = np.percentile(gaps or [0.0], [50, 95])
    length = statistics.fmean(len(sample.token_ids) for sample in samples)
    return (float(ttft[0]), float(ttft[1]), float(between[0]), float(between[1]), length)


async def _answer(
    engine: Engine, config: GenerationConfig, question: Question
) -> tuple[Sample, int]:
    watch = Stopwatch()
    stream = engine.stream(question.prompt, config)
    taken = 0
    async for _ in stream.apieces():
        watch.add(*stream.token_ids[taken:])
        taken = len(stream.token_ids)
    return watch.sample(), stream.report.cached_tokens


async def _answer_by_vllm(vllm: Vllm, tokens: int, question: Question) -> tuple[Sample, int]:
    return await asyncio.to_thread(vllm.answer, question, tokens, may_end=True), 0


async def _stream(
    answer: Answerer, prompts: Sequence[Question], clients: int
) -> list[tuple[Sample, int]]:
    """Every answer."""
    waiting = iter(prompts)
    answers: list[tuple[Sample, int]] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await answer(prompt))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers
