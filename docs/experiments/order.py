"""What an order of chunks is worth that begins as an earlier prompt did (`reorder`).

Questions come one after another, each over chunks of one article, ranked for it by their vectors.
They are asked in this order, and in the one that `Engine.order` makes of it. Between two questions
there is time for what engines do in the background.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import f1, right
from cached_rag.rag.answer import Prompts
from cached_rag.rag.chunks import Embedder

_SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."
ORDERS = ("ranked", "kept")


@dataclass(frozen=True)
class OrderRow:
    """One method and order, means over questions.

    Attributes:
        right, f1: of the answers.
        from_earlier: share of the prompts' tokens whose KV earlier prompts left.
        charged: share of (token, layer) pairs that were computed.
        ttft_ms: median of the milliseconds to the first token.
    """

    method: str
    order: str
    questions: int
    right: float
    f1: float
    from_earlier: float
    charged: float
    ttft_ms: float


def bench_order(
    model: Backend,
    examples: Sequence[Example],
    folder: str,
    *,
    methods: Sequence[str] = ("full", "prefix", "auto"),
    new_tokens: int = 16,
) -> list[OrderRow]:
    """Ask all questions with each method in both orders, each of them in an engine of its own.

    Args:
        folder: for the chunks' KV, which all engines share.
    """
    embedder, store = Embedder(), StoreConfig(path=folder, sequence_disk_bytes=0)
    found: dict[tuple[str, str], list[tuple[float, float, Report]]] = {}
    with ExitStack() as opened:
        engines = {
            (method, order): opened.enter_context(Engine(model, store))
            for method in methods
            for order in ORDERS
        }
        for one in examples:
            texts = _ranked(embedder, one)
            for (method, order), engine in engines.items():
                asked = Prompts(engine, _SYSTEM)
                engine.encode(texts, asked.head())
                given = [texts[at] for at in engine.order(texts)] if order == "kept" else texts
                prompt = asked.rendered(asked.messages(one.question, given))
                config = GenerationConfig(method=method, max_tokens=new_tokens)
                answer = engine.generate(prompt, config)
                scores = right(answer.text, one.answers), f1(answer.text, one.answers)
                found.setdefault((method, order), []).append((*scores, answer.report))
                assert engine.write_back is not None
                engine.write_back.drain()
    return [_row(method, order, rows) for (method, order), rows in found.items()]


def _ranked(embedder: Embedder, one: Example) -> list[str]:
    """The chunks, those nearest to the question first."""
    vectors = embedder.embed([one.question, *one.chunks])
    nearness = (vectors[1:] @ vectors[0]).tolist()
    return [chunk for _, chunk in sorted(zip(nearness, one.chunks, strict=True), reverse=True)]


def _row(method: str, order: str, rows: Sequence[tuple[float, float, Report]]) -> OrderRow:
    rights, scores, reports = zip(*rows, strict=True)
    total = sum(report.prompt_tokens for report in reports)
    return OrderRow(
        method,
        order,
        len(rows),
        statistics.fmean(rights),
        statistics.fmean(scores),
        sum(report.kept_tokens for report in reports) / total,
        statistics.fmean(report.charged_recompute for report in reports),
        statistics.median(report.ttft_ms for report in reports),
    )
