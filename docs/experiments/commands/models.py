"""The tables of docs/models.md, and KV read while layers run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cached_rag.cli.options import Model
from cached_rag.cli.terminal import Json, print_markdown, print_rows
from cached_rag.config import DEFAULT_MODEL
from docs.experiments.commands import Loaded, Repeats


def models(
    models: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Aliases, Hugging Face ids, folders, .gguf files."),
    ],
    repeats: Repeats = 3,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Loading, memory, speed and methods of models, each in its own process (docs/models.md)."""
    from cached_rag.evaluation.machine import machine
    from docs.experiments.models import bench_models

    rows = bench_models(models, repeats=repeats, **how)
    print_markdown(rows, machine(), as_json=as_json)


def architectures(as_json: Json = False) -> None:
    """Which methods each architecture has, or why it is refused; tried on tiny random models."""
    from cached_rag.evaluation.machine import machine
    from docs.experiments.architectures import bench_architectures

    print_markdown(bench_architectures(), machine(), as_json=as_json)


def loading(
    model: Model = DEFAULT_MODEL,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    repeats: Repeats = 3,
    remote: Annotated[str | None, typer.Option(help="A store on another machine.")] = None,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Time to first token with KV on disk, in a temporary folder below this one."""
    from cached_rag import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.loading import bench_loading

    loaded = load_model(model, **how)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = bench_loading(
            loaded,
            Path(folder),
            modules=chunks,
            module_tokens=chunk_tokens,
            repeats=repeats,
            remote=remote,
        )
    print_rows(rows, machine(loaded), as_json=as_json)
