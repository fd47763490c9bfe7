"""Serves requests whose prompts have one beginning, in four ways (RelayAttention, section 4.1).

- "recomputed": nothing is shared or stored, so each request prefills the beginning. The paper's
  vLLM.
- "copied": the beginning's KV comes from the store and is copied for each row. The paper's vLLM-PS
  computes it once, too, but keeps one copy for all rows; in both, each row reads it for itself.
- "relay": the beginning's KV is kept once and read once for all rows. The paper's vLLM-RA.
- "sequential": as "copied", one request after another.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cached_rag.backends.base import Backend
from cached_rag.backends.thread import submit
from cached_rag.config import BatchConfig, GenerationConfig
from cached_rag.engine.decoding import Generation
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.timing import NEW_PROMPTS, make_texts, medians

_Answer = TypeVar("_Answer")
METHODS = ("relay", "copied", "recomputed", "sequential")
_OPENING = "Follow these rules.\n\n"


@dataclass(frozen=True)
class ServingRow:
    """One way of serving all requests at once.

    Attributes:
        tokens_per_s: answer tokens per second, prefill included; median over rounds.
        speedup: `tokens_per_s` over that of "copied", or of the first method without it.
        step_ms: median milliseconds per token of an answer, after the first.
        kv_bytes: most bytes of KV that running answers held at a time.
        computed_tokens: tokens of all prompts that were prefilled.
    """

    method: str
    shared_tokens: int
    requests: int
    tokens_per_s: float
    speedup: float
    step_ms: float
    kv_bytes: int
    computed_tokens: int


@dataclass(frozen=True)
class ArrivalRow:
    """One way of serving requests that arrive at random times (RelayAttention, section 4.3).

    Attributes:
        rate: requests per second that arrive, on average.
        requests_per_s: requests per second that were answered.
        latency_ms: milliseconds from arrival to last token, divided by the answer's tokens; mean
            over requests.
    """

    method: str
    rate: float
    requests_per_s: float
    latency_ms: float


class Workload:
    """Prompts with one beginning, and an engine for each way to serve them.

    Attributes:
        encoding_s: seconds that the beginning took before requests came, by the way's name.
    """

    def __init__(
        self, model: Backend, shared: str, texts: Sequence[str], max_rows: int | None = None
    ) -> None:
        """Make engines, and encode the shared beginning.

        Args:
            texts: what follows the beginning, a request each.
            max_rows: most answers at a time; None for all at once.

        Raises:
            ConfigError: a count below 1.
        """
        every = BatchConfig(max_rows=max_rows or len(texts))
        self.engines = {
            "relay": Engine(model, NEW_PROMPTS, every),
            "copied": Engine(model, NEW_PROMPTS, replace(every, shares=False)),
            "recomputed": Engine(model, NEW_PROMPTS, replace(every, shares=False)),
            "sequential": Engine(model, NEW_PROMPTS, BatchConfig(max_rows=1, shares=False)),
        }
        self.prompts = [f"{_OPENING}{shared}\n{text}" for text in texts]
        self.encoding_s = dict.fromkeys(METHODS, 0.0)
        for name, engine in self.engines.items():
            if name != "recomputed":
                began = time.perf_counter()
                engine.encode([shared], _OPENING, context=None)  # exact where it stands
                self.encoding_s[name] = time.perf_counter() - began

    @classmethod
    def made(
        cls,
        model: Backend,
        shared_tokens: int,
        private_tokens: int,
        requests: int,
        max_rows: int | None = None,
    ) -> Workload:
        """One of made texts, of so many tokens each.

        Raises:
            ConfigError: a count below 1.
        """
        with Engine(model, NEW_PROMPTS) as engine:
            shared, *texts = make_texts(engine, shared_tokens, *[private_tokens] * requests)
        return cls(model, shared, texts, max_rows)

    def close(self) -> None:
        """Close all engines."""
        for engine in self.engines.values():
            engine.close()


@dataclass(frozen=True)
class Served:
    """Answers to all requests, in order; how long they took, and most bytes of KV at a time."""

    answers: list[Generation]
    seconds: float
    kv_bytes: int


def bench_serving(
    model: Backend,
    *,
    shared_tokens: int = 2048,
    private_tokens: int = 128,
    requests: int = 16,
    new_tokens: int = 32,
    repeats: int = 3,
    methods: Sequence[str] = METHODS,
) -> list[ServingRow]:
    """Ask all requests at once, by every method in turn.

    Raises:
        ConfigError: a count below 1, or an unknown method.
    """
    check_methods(methods)
    config = every_token(new_tokens)
    with closing(Workload.made(model, shared_tokens, private_tokens, requests)) as work:
        variants = {
            name: partial(_timed, work.engines[name], work.prompts, config) for name in methods
        }
        found = medians(variants, repeats)
    base = found.get("copied", found[methods[0]])["tokens_per_s"]
    return [
        ServingRow(
            name,
            shared_tokens,
            requests,
            figures["tokens_per_s"],
            figures["tokens_per_s"] / base,
            figures["step_ms"],
            int(figures["kv_bytes"]),
            int(figures["computed_tokens"]),
        )
        for name, figures in found.items()
    ]


def check_methods(methods: Sequence[str]) -> None:
    """Raise ConfigError for an unknown way to serve."""
    if set(methods) - set(METHODS):
        raise ConfigError(f"methods are {', '.join(METHODS)}")


def every_token(new_tokens: int) -> GenerationConfig:
    """Every token takes a step, whatever the answer says."""
    return GenerationConfig("prefix", max_tokens=new_tokens, ignore_eos=True, drafts=False)


def serve(engine: Engine, prompts: Sequence[str], config: GenerationConfig) -> Served:
    """Ask all at once."""
    streams = [engine.stream(prompt, config) for prompt in prompts]
    began = time.perf_counter()
    held = 0
    for stream in streams:
        stream.start()
    answers: list[Generation] = []
    for stream in streams:
        for _ in stream:
            held = max(held, engine.scheduler.nbytes)
        answers.append(stream.generation)
    return Served(answers, time.perf_counter() - began, held)


def _timed(engine: Engine, prompts: Sequence[str], config: GenerationConfig) -> dict[str, float]:
    """The figures of one round, named as in `ServingRow`."""
    served = serve(engine, prompts, config)
    tokens = sum(len(answer.token_ids) for answer in served.answers)
    reports = [answer.report for answer in served.answers]
    later = [
        (report.total_ms - report.ttft_ms) / max(1, report.output_tokens - 1) for report in reports
    ]
    computed = sum(report.prompt_tokens - report.cached_tokens for report in reports)
    return {
        "tokens_per_s": tokens / served.seconds,
        "step_ms": statistics.median(later),
        "kv_bytes": served.kv_bytes,
        "computed_tokens": computed,
    }


def bench_arrivals(
    model: Backend,
    rates: Sequence[float],
    *,
    shared_tokens: int = 2048,
    private_tokens: int = 128,
    requests: int = 32,
    new_tokens: int = 32,
    max_rows: int = 16,
    methods: Sequence[str] = ("relay", "copied"),
) -> list[ArrivalRow]:
    """Ask at random times (a Poisson process), the same ones for every method, for each rate.

    Raises:
        ConfigError: as `bench_serving`.
    """
    check_methods(methods)
    # In the model's thread, where requests are answered (see `backends/thread.py`).
    sizes = shared_tokens, private_tokens, requests, max_rows
    made = submit(partial(Workload.made, model, *sizes)).result()
    config = every_token(new_tokens)
    rows = []
    with closing(made) as work:
        for rate in rates:
            for method in methods:
                engine = work.engines[method]
                asyncio.run(_arriving(engine, work.prompts[:1], config, rate))  # to warm up
                figures = asyncio.run(_arriving(engine, work.prompts, config, rate))
                rows.append(ArrivalRow(method, rate, *figures))
    return rows


async def arriving(asked: Iterable[Awaitable[_Answer]], rate: float) -> list[_Answer]:
    """The answers to requests that arrive at random times, so many a second (a Poisson process).

    Raises:
        ConfigError: the rate is not positive.
    """
    if rate <= 0:
        raise ConfigError(f"so many requests a second arrive; {rate:g} is no such number")
    chance, tasks = random.Random(0), list[asyncio.Future[_Answer]]()
    for one in asked:
        if tasks:
            await asyncio.sleep(chance.expovariate(rate))
        tasks.append(asyncio.ensure_future(one))
    return await asyncio.gather(*tasks)


async def _arriving(
    engine: Engine, prompts: Sequence[str], config: GenerationConfig, rate: float
) -> tuple[float, float]:
    """Requests answered per second, and mean milliseconds per token."""

    async def ask(prompt: str) -> float:
        arrived = time.perf_counter()
        stream = engine.stream(prompt, config)
        await stream.atext()
        return (time.perf_counter() - arrived) * 1000 / len(stream.token_ids)

    began = time.perf_counter()
    latencies = await arriving(map(ask, prompts), rate)
    return len(prompts) / (time.perf_counter() - began), statistics.fmean(latencies)
