"""`mixing` and `signals`: where the quality that reuse costs goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cached_rag.cli.options import Device, Dtype, Model
from cached_rag.cli.terminal import Json, print_rows
from cached_rag.defaults import DEFAULT_MODEL

Data = Annotated[
    list[Path], typer.Argument(help="Question sets (.jsonl), as `cached-rag eval` reads them.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Most questions of a file.")]


def mixing(
    data: Data,
    model: Model = DEFAULT_MODEL,
    limit: Limit = None,
    encoding: Annotated[
        str, typer.Option(help="How chunks are encoded, as behind the @ of `cached-rag eval`.")
    ] = "primer",
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Exact KV for some tokens or layers, stale KV for the rest: what repair can give at best."""
    from cached_rag import Engine
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from docs.experiments.mixing import bench_mixing

    examples = [example for path in data for example in load_examples(path, limit)]
    with Engine.load(model, dtype=dtype, device=device) as engine:
        facts = machine(engine.model)
        rows = bench_mixing(engine, examples, encoding)
    print_rows(rows, facts, as_json=as_json)


def signals(
    data: Data,
    model: Model = DEFAULT_MODEL,
    limit: Limit = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What tells before an answer that reuse will cost it: entropy, or experts that disagree."""
    from cached_rag import Engine
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from docs.experiments.signals import bench_signals

    examples = [example for path in data for example in load_examples(path, limit)]
    with Engine.load(model, dtype=dtype, device=device) as engine:
        facts = machine(engine.model)
        rows = bench_signals(engine, examples)
    print_rows(rows, facts, as_json=as_json)
