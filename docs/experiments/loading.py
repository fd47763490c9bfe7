"""Time to first token with KV on the CUDA device, in memory, on disk, or on another machine.

From disk, KV is read either completely before the prefill or layer by layer during it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine, Prompt
from cached_rag.engine.report import Report
from cached_rag.errors import StoreError
from cached_rag.evaluation.timing import NEW_PROMPTS, make_prompt, medians

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
    remote: str | None = None,
) -> list[LoadingRow]:
    """Time requests with every method and way of loading, and full prefill, in turn.

    Every request has a new engine, so that no KV is in memory or verified before it. The files'
    pages are dropped from the system's cache first, where the system allows it (Linux).

    Args:
        remote: address of a store on another machine, as `StoreConfig.remote`, which is timed, too.
            What is sent there is deleted afterwards.
    """
    alone = dataclasses.replace(NEW_PROMPTS, write_back=False)
    settings = dataclasses.replace(alone, path=str(folder))
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
        return _times(report)

    variants: dict[tuple[str, str], Callable[[], dict[str, float]]] = {
        (method, way): partial(asked, method, way, options)
        for method in _METHODS
        for way, options in _ways(model.shapes.device.type).items()
    }
    variants["full", "nowhere"] = partial(asked, "full", "disk", {})
    if remote is None:
        found = medians(variants, repeats)
    else:
        far = dataclasses.replace(alone, remote=remote, namespace=os.urandom(8).hex())
        with Engine(model, far) as sender:
            sender.encode(texts, context=None)
            for method in _METHODS:
                variants[method, "remote"] = partial(_brought, model, far, method, prompt, texts)
            found = medians(variants, repeats)
            sender.forget(texts)
    return [LoadingRow(method, way, **figures) for (method, way), figures in found.items()]


def _brought(
    model: Backend, settings: StoreConfig, method: str, prompt: Prompt, texts: list[str]
) -> dict[str, float]:
    """Times of a request whose KV comes from another machine.

    Raises:
        StoreError: not all of it came.
    """
    with Engine(model, settings) as engine:
        engine.register(texts)
        report = engine.generate(prompt, GenerationConfig(method=method, max_tokens=1)).report
    if report.modules_hit < len(texts):
        raise StoreError(
            f"KV of {report.modules_hit} of {len(texts)} texts came from the remote store; look at "
            f"the server, then measure again ({'; '.join(report.notes)})"
        )
    return _times(report)


def _times(report: Report) -> dict[str, float]:
    return {name: getattr(report, name) for name in ("ttft_ms", "load_ms", "fuse_ms")}


def _fetch(engine: Engine, texts: list[str]) -> None:
    """Read the texts' KV from disk into memory."""
    for behind in engine.library.encoded_after():
        for text in texts:
            engine.library.shelf.fetch(behind, engine.tokenization.literal(text).ids)


def _ways(device: str) -> dict[str, dict[str, Any]]:
    """Where KV is before a request, with the store's settings that keep it there."""
    ways: dict[str, dict[str, Any]] = {"device": {"pipelined": True}} if device == "cuda" else {}
    return ways | {
        "memory": {"pipelined": True, "device_bytes": 0},
        "disk, read first": {"pipelined": False, "device_bytes": 0},
        "disk, layer by layer": {"pipelined": True, "device_bytes": 0},
    }


def forget_pages(folder: Path) -> None:
    """Ask the system to drop a folder's KV files from its page cache, so that the disk is read."""
    if not hasattr(os, "posix_fadvise"):
        return  # on such a system the page cache is measured instead
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
