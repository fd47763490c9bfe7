"""What depends on the number of chunks, with so many really stored."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from cached_rag.cli.options import numbers
from cached_rag.cli.terminal import Json, err
from cached_rag.config import DEFAULT_MODEL
from docs.experiments.commands import Loaded, print_rows


def stored(
    model: Annotated[
        str,
        typer.Option(help='A model; or "tiny", one of random weights whose KV takes little room.'),
    ] = DEFAULT_MODEL,
    chunks: Annotated[
        str, typer.Option(help="Numbers of chunks, comma-separated, growing.")
    ] = "100,1000,10000",
    per_prompt: Annotated[int, typer.Option("-k", min=1, help="Chunks of a prompt.")] = 16,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each, after one to warm up.")] = 9,
    folder: Annotated[
        Path | None,
        typer.Option(help="An empty folder for the files, which stay; else a temporary one."),
    ] = None,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Opening, finding and reading where so many chunks are really stored (docs/scale.md)."""
    from cached_rag import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.random_model import random_model
    from docs.experiments.stored import bench_stored

    counts = [round(count) for count in numbers(chunks, float, "chunks are numbers")]
    loaded = random_model(model, "cpu") if model == "tiny" else load_model(model, **how)
    with (
        tempfile.TemporaryDirectory() as temporary,
        Progress(console=err, disable=as_json) as bar,
    ):
        task = bar.add_task("encoding", total=max(counts, default=0))
        rows = bench_stored(
            loaded,
            folder or Path(temporary),
            counts,
            per_prompt=per_prompt,
            prompts=prompts,
            progress=lambda done: bar.advance(task, done),
        )
    print_rows(rows, machine(loaded), as_json=as_json)
