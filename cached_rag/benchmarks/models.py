"""What models of one's own take and can do: loading, memory, decoding, methods. For docs/models.md.

Each is measured in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from cached_rag.backends.base import Backend
from cached_rag.backends.transformers.loading import load_model
from cached_rag.backends.transformers.memory import peak_bytes
from cached_rag.benchmarks.ttft import bench_ttft
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError

_MODULES, _MODULE_TOKENS, _QUESTION, _DECODED = 8, 256, 32, 32


@dataclass(frozen=True)
class ModelRow:
    """One model on this machine.

    Attributes:
        load_s: from its name to the first prompt: reading, and the examination, `examine_s` of it.
        weights_bytes: of its parameters, in the dtype it computes in.
        overhead_bytes: most memory that the process held while it loaded, above the weights and
            what it held before.
        position_rule, methods: how its keys are moved, and what follows.
        decode_ms: median of one token of an answer behind a prompt.
        kv_bytes_per_token: of its KV.
        full_ms, auto_ms: median times to the first token of a prompt of `prompt_tokens`.
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
    name: str, *, dtype: str | None = None, device: str | None = None, repeats: int = 3
) -> ModelRow:
    """Load a model, time it, and look what its process took; for a fresh process."""
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    model = load_model(name, dtype, device)
    loaded, peak = time.perf_counter() - began, peak_bytes()
    weights = model.weights_bytes
    with Engine(model) as engine:
        rows = {
            row.method: row
            for row in bench_ttft(
                engine,
                modules=_MODULES,
                module_tokens=min(_MODULE_TOKENS, model.context_length // (_MODULES + 2)),
                question_tokens=_QUESTION,
                methods=["auto"],
                repeats=repeats,
            )
        }
        decoding = _decode_ms(engine, repeats)
    return ModelRow(
        name=name,
        dtype=str(model.dtype).removeprefix("torch."),
        load_s=round(loaded, 1),
        examine_s=round(model.examined_s, 2),
        weights_bytes=weights,
        overhead_bytes=max(0, peak - before - weights),
        position_rule=str(model.rule),
        methods=methods_of(model),
        decode_ms=round(decoding, 1),
        kv_bytes_per_token=model.shapes.bytes_per_token,
        prompt_tokens=rows["auto"].prompt_tokens,
        full_ms=round(rows["full"].ttft_ms, 1),
        auto_ms=round(rows["auto"].ttft_ms, 1),
    )


def bench_models(
    names: Sequence[str], *, dtype: str | None = None, device: str | None = None, repeats: int = 3
) -> list[ModelRow]:
    """`bench_model` of each, one after the other, each in a fresh process.

    Raises:
        ModelError: one of them fails; its message.
    """
    options = {"dtype": dtype, "device": device, "repeats": repeats}
    return [_in_a_process(name, options) for name in names]


def methods_of(model: Backend) -> str:
    """Which methods a model can have, in words."""
    if not model.rule.is_movable:
        return "full, prefix"
    if not model.can_watch:
        return "without auto and those that ask the question; no batches"
    return "all" if model.rule.limit is None else "all; no batches"


def _in_a_process(name: str, options: dict[str, Any]) -> ModelRow:
    code = (
        "import json, sys, dataclasses\n"
        "from cached_rag.benchmarks.models import bench_model\n"
        "name, options = json.loads(sys.argv[1])\n"
        "print(json.dumps(dataclasses.asdict(bench_model(name, **options))))"
    )
    asked = json.dumps([name, options])
    done = subprocess.run(
        [sys.executable, "-c", code, asked], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ModelError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return ModelRow(**json.loads(done.stdout.splitlines()[-1]))


def _decode_ms(engine: Engine, repeats: int) -> float:
    """Milliseconds a token after the first, behind a short prompt."""
    found = []
    for _ in range(repeats + 1):
        made = engine.generate("Once upon a time", method="full", max_tokens=_DECODED)
        report = made.report
        if report.output_tokens > 1:
            found.append((report.total_ms - report.ttft_ms) / (report.output_tokens - 1))
    return statistics.median(found[1:] or [float("nan")])


def to_markdown(rows: Sequence[Any]) -> str:
    """Dataclasses as a Markdown table, bytes in MB, as the docs have it."""
    names = [field.name for field in dataclasses.fields(rows[0])]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = []
        for name in names:
            value = getattr(row, name)
            is_size = name.endswith("_bytes")
            cells.append(f"{value / 1e6:.0f} MB" if is_size else str(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
