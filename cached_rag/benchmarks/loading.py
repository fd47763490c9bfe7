"""Time to first token with KV in memory, a CUDA device's and the host's, and on disk, read first or
layer by layer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.benchmarks.ttft import make_texts
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.profile import forget_pages

_PREFIX = "Read these texts.\n\n"


@dataclass(frozen=True)
class LoadingRow:
    """One way of loading: medians, milliseconds."""

    method: str
    loading: str
    ttft_ms: float
    load_ms: float
    fuse_ms: float


def bench_loading(
    model: Backend,
    folder: Path,
    *,
    modules: int = 8,
    module_tokens: int = 512,
    question_tokens: int = 32,
    methods: tuple[str, ...] = ("reuse", "auto"),
    repeats: int = 5,
    on_round: Callable[[], None] = lambda: None,
) -> list[LoadingRow]:
    """Every request in an engine of its own, so that nothing is verified or in memory before.

    Before each the files' pages are dropped where the system lets us (Linux).
    """
    settings = StoreConfig(path=str(folder), write_back=False)
    with Engine(model, settings) as engine:
        texts, question = make_texts(engine, modules, module_tokens, question_tokens)
        engine.encode(texts, prefix=_PREFIX)
    prompt = _PREFIX + "\n".join([*texts, question])
    ways = _ways(model.shapes.device.type)
    samples: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for round_ in range(repeats + 1):
        for method in methods:
            for way, options in ways.items():
                forget_pages(folder)
                config = GenerationConfig(method=method, max_tokens=1)
                with Engine(model, dataclasses.replace(settings, **options)) as engine:
                    if not way.startswith("disk"):
                        for behind in engine.library.behinds():
                            for text in texts:
                                ids = engine.tokenization.literal(text).ids
                                engine.library.fetch(behind, ids)
                        engine.generate(prompt, config)
                    report = engine.generate(prompt, config).report
                if round_:
                    found = (report.ttft_ms, report.load_ms, report.fuse_ms)
                    samples.setdefault((method, way), []).append(found)
        on_round()
    return [
        LoadingRow(
            *names, *(round(statistics.median(column), 2) for column in zip(*rows, strict=True))
        )
        for names, rows in samples.items()
    ]


def _ways(device: str) -> dict[str, dict[str, Any]]:
    """Where KV is before a request, and the store's settings for it."""
    ways: dict[str, dict[str, Any]] = {"device": {"pipelined": True}} if device == "cuda" else {}
    return ways | {
        "memory": {"pipelined": True, "device_bytes": 0},
        "disk, read first": {"pipelined": False, "device_bytes": 0},
        "disk, layer by layer": {"pipelined": True, "device_bytes": 0},
    }
