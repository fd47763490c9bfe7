"""Loading time, memory, decoding speed and methods of models. For docs/models.md.

Each model is measured in its own process, so that the process's peak memory is the model's. Knows
transformers, since it measures how its models load.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import psutil

from cached_rag.backends.base import Backend
from cached_rag.backends.machine import peak_bytes
from cached_rag.backends.transformers.loading import load_model
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError
from cached_rag.evaluation.timing import NEW_PROMPTS, bench_ttft, configs_of, medians

_MODULES, _MODULE_TOKENS, _QUESTION, _DECODED = 8, 256, 32, 32


@dataclass(frozen=True)
class ModelRow:
    """One model on this machine.

    Attributes:
        load_s: seconds from the name to a model that is ready, the examination included.
        examine_s: seconds of the examination.
        weights_bytes: bytes of the weights, in the dtype the model computes in.
        overhead_bytes: most memory that the process held while the model loaded, less the weights
            and what the process held before.
        position_rule: how the model's keys depend on position.
        methods: the methods that it can have, in words.
        decode_ms: median milliseconds of one token of an answer, after the first.
        full_ms, auto_ms: median milliseconds to the first token after `prompt_tokens`, with full
            prefill and with `auto`.
    """

    name: str
    dtype: str
    load_s: float
    examine_s: float
    weights_bytes: int
    overhead_bytes: int
    position_rule: str
    methods: str
    decode_ms: float
    kv_bytes_per_token: int
    prompt_tokens: int
    full_ms: float
    auto_ms: float


def bench_model(
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    weights: str = "as stored",
    repeats: int = 3,
) -> ModelRow:
    """Load a model and measure it; right only in a process that has done nothing else."""
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    model = load_model(name, dtype, device, weights)
    loaded, peak = time.perf_counter() - began, peak_bytes()
    with Engine(model, NEW_PROMPTS) as engine:
        timed = bench_ttft(
            engine,
            configs_of(["auto"]),
            modules=_MODULES,
            module_tokens=min(_MODULE_TOKENS, model.context_length // (_MODULES + 2)),
            question_tokens=_QUESTION,
            repeats=repeats,
        )
        decoding = medians({"decode": lambda: _decode(engine)}, repeats)["decode"]
    rows = {row.method: row for row in timed}
    return ModelRow(
        name=name,
        dtype=str(model.shapes.dtype).removeprefix("torch."),
        load_s=loaded,
        examine_s=model.examined_s,
        weights_bytes=model.weights_bytes,
        overhead_bytes=max(0, peak - before - model.weights_bytes),
        position_rule=str(model.rule),
        methods=methods_of(model),
        decode_ms=decoding["token_ms"],
        kv_bytes_per_token=model.shapes.bytes_per_token,
        prompt_tokens=rows["auto"].prompt_tokens,
        full_ms=rows["full"].ttft_ms,
        auto_ms=rows["auto"].ttft_ms,
    )


def bench_models(
    names: Sequence[str],
    *,
    dtype: str | None = None,
    device: str | None = None,
    weights: str = "as stored",
    repeats: int = 3,
) -> list[ModelRow]:
    """Call `bench_model` for each model, one after another, each in a fresh process.

    Raises:
        CachedRAGError: one of them fails.
    """
    options = {"dtype": dtype, "device": device, "weights": weights, "repeats": repeats}
    return [_in_a_process(name, options) for name in names]


def methods_of(model: Backend) -> str:
    """Which methods a model can have, in words."""
    if model.keeps_states:
        composed = "; chunks by `compose`" if model.composer else ""
        return f"exact beginnings, from snapshots of states{composed}"
    batches = "" if model.can_batch else "; no batches"
    if not model.rule.is_movable:
        return f"full, prefix{batches}"
    if not model.can_watch:
        return f"without auto and those that ask the question{batches}"
    return f"all{batches}"


def _in_a_process(name: str, options: dict[str, Any]) -> ModelRow:
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh) as pool:
        try:
            return pool.submit(bench_model, name, **options).result()
        except BrokenProcessPool as error:
            raise ModelError(
                f"{name}: the process that measured it was ended; most likely memory was short"
            ) from error


def _decode(engine: Engine) -> dict[str, float]:
    """Milliseconds per token of an answer to a short prompt, one step for each after the first."""
    config = GenerationConfig("full", max_tokens=_DECODED, ignore_eos=True, drafts=False)
    report = engine.generate("Once upon a time", config).report
    return {"token_ms": (report.total_ms - report.ttft_ms) / (report.output_tokens - 1)}
