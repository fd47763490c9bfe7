"""Time to first token with KV on the CUDA device, in memory, on disk, or on another machine.

From disk, KV is read either completely before the prefill or layer by layer during it. A device of
any pace is a folder from which reading takes as much longer (CacheBlend, figure 17).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine, Prompt
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError, StoreError
from cached_rag.evaluation.timing import NEW_PROMPTS, make_prompt, medians
from cached_rag.kv import remote as remote_tier
from cached_rag.kv.transports import ObjectBlobs

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


@dataclass(frozen=True)
class PaceRow:
    """Median milliseconds of one method with KV on a device of one pace, as in `Report`.

    Attributes:
        mb_per_s: what the device gives; 0 where nothing is read.
        brought: share of the chunks whose KV was read; the others were computed sooner.
    """

    method: str
    mb_per_s: float
    ttft_ms: float
    load_ms: float
    brought: float


def bench_paces(
    model: Backend,
    folder: Path,
    paces: Sequence[float],
    *,
    methods: Sequence[str] = _METHODS,
    modules: int = 8,
    module_tokens: int = 512,
    repeats: int = 3,
) -> list[PaceRow]:
    """Time requests whose KV lies on devices of some paces, in megabytes a second, in turn.

    By a first request the engine learns the device's pace, and what the loading controller makes of
    it is timed in later ones.

    Raises:
        ConfigError: a pace is not positive.
    """
    if min(paces) <= 0:
        raise ConfigError(f"paces are megabytes a second, not {min(paces):g}")
    alone = dataclasses.replace(NEW_PROMPTS, write_back=False)
    far = dataclasses.replace(alone, remote=folder.absolute().as_uri(), remote_timeout=3000.0)
    with Engine(model, far) as engine:
        prompt, texts = make_prompt(engine, modules, module_tokens, _QUESTION_TOKENS)
        engine.encode(texts, context=None)

    def asked(engine: Engine, method: str) -> dict[str, float]:
        shelf = engine.library.shelf
        for behind, text in product(engine.library.encoded_after(), texts):
            shelf.delete(shelf.key(behind, engine.tokenization.literal(text).ids))
        report = engine.generate(prompt, GenerationConfig(method=method, max_tokens=1)).report
        brought = report.modules_hit / len(texts)
        return {"ttft_ms": report.ttft_ms, "load_ms": report.load_ms, "brought": brought}

    variants: dict[tuple[str, float], Callable[[], dict[str, float]]] = {}
    with ExitStack() as opened:
        for pace in paces:
            with patch.object(remote_tier, "open_transport", partial(_Slowed, pace)):
                engine = opened.enter_context(Engine(model, far))
            engine.register(texts)
            asked(engine, methods[0])
            variants |= {(method, pace): partial(asked, engine, method) for method in methods}
        variants["full", 0.0] = partial(asked, opened.enter_context(Engine(model, alone)), "full")
        found = medians(variants, repeats)
    return [PaceRow(method, pace, **figures) for (method, pace), figures in found.items()]


class _Slowed(ObjectBlobs):
    """A folder that gives so many megabytes a second."""

    def __init__(self, pace: float, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self._pace = pace

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """As ever, but late."""
        began, found = time.perf_counter(), super().get(names, most_bytes)
        due = sum(len(data) for data in found if data) / (self._pace * 1e6)
        time.sleep(max(0.0, due - (time.perf_counter() - began)))
        return found


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
