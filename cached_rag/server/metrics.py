"""Counts for Prometheus. Knows reports; knows no request's content."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What one server has done, and what it holds now."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        times = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("cached_rag_requests", "Requests answered.", ["path", "status"])
        self._tokens = counter(
            "cached_rag_tokens",
            "Tokens: of prompts, cached, recomputed; of answers, drafted, accepted.",
            ["kind"],
        )
        self._modules = counter("cached_rag_modules", "Known texts in prompts.", ["found"])
        self._first = times(
            "cached_rag_time_to_first_token_seconds",
            "From arrival to the first token, by method.",
            ["method"],
        )
        self._whole = times("cached_rag_answer_seconds", "From arrival to the end.")
        scheduler, library, kept = engine.scheduler, engine.library, engine.sequences
        for name, what, value in (
            ("running", "Answers being made.", lambda: scheduler.num_running),
            ("waiting", "Requests that wait.", lambda: scheduler.num_waiting),
            ("kv_bytes", "KV of running answers.", lambda: scheduler.nbytes),
            ("recent_bytes", "KV of finished ones.", lambda: kept.nbytes),
            ("store_memory_bytes", "KV of texts in memory.", library.shelf.memory_bytes),
            ("store_bytes", "KV of texts kept.", library.shelf.store_bytes),
        ):
            gauge(f"cached_rag_{name}", what).set_function(value)
        self._audits = engine.audits
        self._audit = gauge(
            "cached_rag_audit",
            "The last audits: number, mean divergence from full prefill (nats), agreement.",
            ["method", "figure"],
        )

    def responded(self, path: str, status: int) -> None:
        """Count a response, when it begins."""
        self._requests.labels(path, str(status)).inc()

    def answered(self, report: Report, *, is_whole: bool) -> None:
        """Count an answer, when it is complete or given up.

        Args:
            is_whole: it was not given up, so that its time is that of an answer.
        """
        counts = {
            "prompt": report.prompt_tokens,
            "cached": report.cached_tokens,
            "recomputed": report.recomputed_tokens,
            "answer": report.output_tokens,
            "drafted": report.drafted_tokens,
            "accepted": report.accepted_tokens,
        }
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        self._modules.labels("hit").inc(report.modules_hit)
        self._modules.labels("missed").inc(report.modules_missed)
        if report.output_tokens and report.ttft_ms:
            self._first.labels(_root(report.method)).observe(report.ttft_ms / 1000)
        if report.output_tokens and is_whole:
            self._whole.observe(report.total_ms / 1000)

    def text(self) -> bytes:
        """All counts in Prometheus' format."""
        for method, found in self._audits.found().items():
            for figure, value in dataclasses.asdict(found).items():
                self._audit.labels(_root(method), figure).set(value)
        return generate_latest(self._registry)


def _root(method: str) -> str:
    """A method without the options that clients may give: each text would make another label."""
    return re.split(r"[:+(]", method)[0]
