"""Time to first token with KV on the CUDA device, in the host's memory and on disk.

From disk, KV is read either completely before the prefill or layer by layer during it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.benchmarks.loop import medians
from cached_rag.benchmarks.new_prompts import NEW_PROMPTS
from cached_rag.benchmarks.texts import make_prompt
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.profile import forget_pages

_METHODS, _QUESTION_TOKENS = ("reuse", "auto"), 32


@dataclass(frozen=True)
class LoadingRow:
    """Median milliseconds of one method with one way of loading, as in `Report`."""

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
    repeats: int = 5,
) -> list[LoadingRow]:
    """Time requests with every method and way of loading, in turn.

    Every request has a new engine, so that no KV is in memory or verified before it. The files'
    pages are dropped from the system's cache first, where the system allows it (Linux).
    """
    settings = dataclasses.replace(NEW_PROMPTS, path=str(folder), write_back=False)
    with Engine(model, settings) as engine:
        prompt, texts = make_prompt(engine, modules, module_tokens, _QUESTION_TOKENS)

    def asked(method: str, way: str, options: dict[str, Any]) -> dict[str, float]:
        forget_pages(folder)
        config = GenerationConfig(method=method, max_tokens=1)
        with Engine(model, dataclasses.replace(settings, **options)) as engine:
            if not way.startswith("disk"):
                _fetch(engine, texts)
                engine.generate(prompt, config)
            report = engine.generate(prompt, config).report
        return {name: getattr(report, name) for name in ("ttft_ms", "load_ms", "fuse_ms")}

    variants = {
        (method, way): partial(asked, method, way, options)
        for method in _METHODS
        for way, options in _ways(model.shapes.device.type).items()
    }
    found = medians(variants, repeats)
    return [LoadingRow(method, way, **figures) for (method, way), figures in found.items()]


def _fetch(engine: Engine, texts: list[str]) -> None:
    """Read the texts' KV from disk into memory."""
    for behind in engine.library.encoded_after():
        for text in texts:
            engine.library.fetch(behind, engine.tokenization.literal(text).ids)


def _ways(device: str) -> dict[str, dict[str, Any]]:
    """Where KV is before a request, with the store's settings that keep it there."""
    ways: dict[str, dict[str, Any]] = {"device": {"pipelined": True}} if device == "cuda" else {}
    return ways | {
        "memory": {"pipelined": True, "device_bytes": 0},
        "disk, read first": {"pipelined": False, "device_bytes": 0},
        "disk, layer by layer": {"pipelined": True, "device_bytes": 0},
    }
