"""A stream of questions over chunks that many of them share: throughput and waiting time.

Several clients ask at the same time, each its next question as soon as it has an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cached_rag.backends.thread import submit
from cached_rag.benchmarks.new_prompts import check_prompts_are_new
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.library.context import PRIMER
from cached_rag.rag.prompts import Prompts

_SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."


@dataclass(frozen=True)
class TrafficRow:
    """One method on one stream of questions.

    Attributes:
        speedup: `requests_per_s` over that of the first method.
        ttft_p50_ms, ttft_p95_ms: percentiles of the milliseconds from asking to the first token.
        cached: share of all prompt tokens that came from the cache.
    """

    name: str
    method: str
    requests: int
    clients: int
    requests_per_s: float
    speedup: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    cached: float


def bench_traffic(
    engine: Engine,
    questions: Sequence[tuple[Sequence[str], str]],
    *,
    name: str = "",
    methods: Sequence[str] = ("full", "prefix", "auto"),
    clients: int = 4,
    new_tokens: int = 32,
    drafts: bool = True,
) -> list[TrafficRow]:
    """Ask all questions with each method; encoding their chunks is not timed.

    Args:
        questions: (chunks, question) each.

    Raises:
        ConfigError: the engine keeps finished prompts, so one method would find another's.
    """
    check_prompts_are_new(engine)
    texts = list(dict.fromkeys(chunk for chunks, _ in questions for chunk in chunks))
    asked = Prompts(engine, _SYSTEM)
    prompts = [asked.messages(question, chunks) for chunks, question in questions]
    # In the model's thread, where requests are answered (see `backends/thread.py`).
    submit(partial(engine.encode, texts, asked.head(), context=PRIMER)).result()
    rows: list[TrafficRow] = []
    for method in methods:
        config = GenerationConfig(method=method, max_tokens=new_tokens, drafts=drafts)
        asyncio.run(_stream(engine, prompts[:1], config, 1))  # to warm up
        seconds, reports = asyncio.run(_stream(engine, prompts, config, clients))
        rate = len(prompts) / seconds
        median, late = np.percentile([report.ttft_ms for report in reports], [50, 95]).tolist()
        cached = sum(report.cached_tokens for report in reports)
        rows.append(
            TrafficRow(
                name,
                method,
                len(prompts),
                clients,
                rate,
                rate / (rows[0].requests_per_s if rows else rate),
                median,
                late,
                cached / sum(report.prompt_tokens for report in reports),
            )
        )
    return rows


async def _stream(
    engine: Engine,
    prompts: Sequence[Sequence[dict[str, str]]],
    config: GenerationConfig,
    clients: int,
) -> tuple[float, list[Report]]:
    """Seconds until all are answered, and every request's report."""
    waiting = iter(prompts)
    reports: list[Report] = []

    async def client() -> None:
        for prompt in waiting:
            stream = engine.stream(prompt, config)
            await stream.atext()
            reports.append(stream.report)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - began, reports
