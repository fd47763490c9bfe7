"""Many requests over one shared beginning: relayed, over copies, recomputed, one after another.

"recomputed" is the RelayAttention paper's vLLM (section 4.1): nothing is shared or stored, so each
request prefills the beginning itself. The other three find its KV in the store. "relay" is vLLM-RA:
kept once and read once for all rows. "copied" lies between the paper's vLLM and vLLM-PS: nothing is
computed twice, as in vLLM-PS, but every row keeps the beginning for itself (there, once for all),
and every row reads it for itself (as there). "sequential" is "copied", a request at a time.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cached_rag.backends.base import Backend
from cached_rag.backends.thread import submit
from cached_rag.benchmarks.ttft import make_texts
from cached_rag.config import BatchConfig, GenerationConfig
from cached_rag.engine.decoding import Generation
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError

METHODS = ("relay", "copied", "recomputed", "sequential")
_OPENING = "Follow these rules.\n\n"


@dataclass(frozen=True)
class ServingRow:
    """One way of serving all requests at once.

    Attributes:
        tokens_per_s: median over rounds of answer tokens a second, prefill included.
        speedup: over "copied", plain batched decoding with the shared KV copied for every row.
        step_ms: median time of an answer's later tokens, each.
        kv_bytes: most KV of running answers at a time.
        computed_tokens: of all prompts, those that were prefilled.
    """

    method: str
    requests: int
    tokens_per_s: float
    speedup: float
    step_ms: float
    kv_bytes: int
    computed_tokens: int


@dataclass(frozen=True)
class ArrivalRow:
    """One way of serving requests that arrive by chance (section 4.3).

    Attributes:
        rate: requests a second that arrive, on average.
        requests_per_s: that were answered.
        latency_ms: mean over requests of time from arrival to last token, a token.
    """

    method: str
    rate: float
    requests_per_s: float
    latency_ms: float


class Workload:
    """Prompts that share a beginning, and an engine for each way to serve them."""

    def __init__(
        self, model: Backend, shared_tokens: int, private_tokens: int, requests: int
    ) -> None:
        """Encode the shared beginning.

        Raises:
            ConfigError: a count below 1.
        """
        if min(shared_tokens, private_tokens, requests) < 1:
            raise ConfigError("shared tokens, private tokens and requests must be at least 1")
        every = BatchConfig(max_rows=requests)
        self.engines = {
            "relay": Engine(model, batch=every),
            "copied": Engine(model, batch=replace(every, shares=False)),
            "recomputed": Engine(model, batch=replace(every, shares=False)),
            "sequential": Engine(model, batch=BatchConfig(max_rows=1, shares=False)),
        }
        engine = self.engines["relay"]
        (shared,), _ = make_texts(engine, 1, shared_tokens, 1)
        texts, _ = make_texts(engine, requests + 1, private_tokens, 1)
        self.prompts = [f"{_OPENING}{shared}\n{text}" for text in texts[1:]]
        for name, engine in self.engines.items():
            if name != "recomputed":
                engine.encode([shared], _OPENING)

    def close(self) -> None:
        """Close all engines."""
        for engine in self.engines.values():
            engine.close()


def bench_serving(
    model: Backend,
    *,
    shared_tokens: int = 2048,
    private_tokens: int = 128,
    requests: int = 16,
    new_tokens: int = 32,
    repeats: int = 3,
    methods: Sequence[str] = METHODS,
    on_round: Callable[[], None] = lambda: None,
) -> list[ServingRow]:
    """Ask all at once, in every way in turn, `repeats` rounds after one to warm up.

    Raises:
        ConfigError: a count below 1, or an unknown method.
    """
    _check(methods, new_tokens, repeats)
    work = Workload(model, shared_tokens, private_tokens, requests)
    config = GenerationConfig(method="prefix", max_tokens=new_tokens, ignore_eos=True)
    samples: dict[str, list[tuple[float, ...]]] = {method: [] for method in methods}
    for round_ in range(repeats + 1):
        for method, taken in samples.items():
            found = _timed(work.engines[method], work.prompts, config)
            if round_:
                taken.append(found)
        on_round()
    work.close()
    medians = {
        method: [statistics.median(column) for column in zip(*taken, strict=True)]
        for method, taken in samples.items()
    }
    base = medians.get("copied", next(iter(medians.values())))[0]
    return [
        ServingRow(
            method,
            requests,
            round(rate, 2),
            round(rate / base, 3),
            round(step, 2),
            int(held),
            int(computed),
        )
        for method, (rate, step, held, computed) in medians.items()
    ]


def _check(methods: Sequence[str], *counts: int) -> None:
    if set(methods) - set(METHODS) or min(counts) < 1:
        raise ConfigError(f"methods are {', '.join(METHODS)}; new tokens and repeats at least 1")


def _timed(engine: Engine, prompts: Sequence[str], config: GenerationConfig) -> tuple[float, ...]:
    """Tokens a second, milliseconds a later token, bytes of KV, prompt tokens computed."""
    streams = [engine.stream(prompt, config) for prompt in prompts]
    began = time.perf_counter()
    held = 0
    for stream in streams:
        stream.start()
    answers: list[Generation] = []
    for stream in streams:
        for _ in stream:
            held = max(held, engine.scheduler.nbytes)
        answers.append(stream.result())
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.token_ids) for answer in answers)
    reports = [answer.report for answer in answers]
    later = [
        (report.total_ms - report.ttft_ms) / max(1, report.output_tokens - 1) for report in reports
    ]
    computed = sum(report.prompt_tokens - report.cached_tokens for report in reports)
    return tokens / seconds, statistics.median(later), held, computed


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
    """Ask at random moments (Poisson), the same ones for every way, for each rate.

    Raises:
        ConfigError: as `bench_serving`.
    """
    _check(methods, new_tokens)
    # In the model's thread, where requests are answered (see `model_thread`).
    work = submit(partial(Workload, model, shared_tokens, private_tokens, requests)).result()
    config = GenerationConfig(method="prefix", max_tokens=new_tokens, ignore_eos=True)
    rows = []
    for rate in rates:
        for method in methods:
            engine = work.engines[method]
            engine.scheduler.config = replace(engine.scheduler.config, max_rows=max_rows)
            asyncio.run(_arriving(engine, work.prompts[:1], config, rate))
            answered, latency = asyncio.run(_arriving(engine, work.prompts, config, rate))
            rows.append(ArrivalRow(method, rate, round(answered, 3), round(latency, 1)))
    work.close()
    return rows


async def _arriving(
    engine: Engine, prompts: Sequence[str], config: GenerationConfig, rate: float
) -> tuple[float, float]:
    """Requests answered a second, and mean milliseconds a token."""
    draw = random.Random(0)
    latencies: list[float] = []

    async def ask(prompt: str) -> None:
        arrived = time.perf_counter()
        stream = engine.stream(prompt, config)
        await stream.atext()
        latencies.append((time.perf_counter() - arrived) * 1000 / len(stream.token_ids))

    began = time.perf_counter()
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(ask(prompt)))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)
    return len(prompts) / (time.perf_counter() - began), statistics.fmean(latencies)
