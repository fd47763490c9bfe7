"""The tables of docs/models.md, and KV read while layers run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.options import Loading, Model, names, numbers
from cached_rag.cli.terminal import Json, out, plain, print_json, print_machine, print_table
from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from docs.experiments.commands import Loaded, Methods, Repeats, print_rows


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
    _print(rows, machine(), as_json=as_json)


def architectures(
    families: Annotated[
        list[str] | None, typer.Argument(help="By transformers' names; none for all.")
    ] = None,
    published: Annotated[
        bool, typer.Option(help="With a published model's layers, only narrower.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the models' weights.")] = "float32",
    as_json: Json = False,
) -> None:
    """Which methods each architecture has, or why it is refused; tried on tiny random models."""
    from cached_rag.backends.machine import parse_dtype
    from cached_rag.evaluation.machine import machine
    from docs.experiments.architectures import bench_architectures

    asked = tuple(families or ())
    rows = bench_architectures(asked, published=published, dtype=parse_dtype(dtype))
    _print(rows, machine(), as_json=as_json)


def loading(
    model: Model = DEFAULT_MODEL,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    repeats: Repeats = 3,
    remote: Annotated[str | None, typer.Option(help="A store on another machine.")] = None,
    paces: Annotated[
        str, typer.Option(help="Instead, devices of so many MB a second, comma-separated.")
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Methods with --paces, comma-separated.")
    ] = "reuse,auto",
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Time to first token with KV on disk, in a temporary folder below this one."""
    from cached_rag import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.loading import bench_loading, bench_paces

    if paces and remote:
        raise ConfigError("paces are of folders; leave out --remote, or --paces")
    loaded = load_model(model, **how)
    sizes = {"modules": chunks, "module_tokens": chunk_tokens, "repeats": repeats}
    rows: Sequence[Any]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        if paces:
            given = numbers(paces, float, "paces are numbers")
            rows = bench_paces(loaded, Path(folder), given, methods=names(methods), **sizes)
        else:
            rows = bench_loading(loaded, Path(folder), remote=remote, **sizes)
    print_rows(rows, machine(loaded), as_json=as_json)


def deviation(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = DEFAULT_MODEL,
    methods: Methods = "reuse,cacheblend:recompute_ratio=0.05,cacheblend,"
    "cacheblend:recompute_ratio=0.3,cacheblend:recompute_ratio=0.5,random",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 8,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """How KV computed apart differs from full prefill's, by token, layer and method."""
    from cached_rag import Engine
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS
    from docs.experiments.deviation import measure_deviation

    examples = [example for path in data for example in load_examples(path)[:limit]]
    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        layers, rows = measure_deviation(engine, examples, names(methods))
        facts = machine(engine.model)
    if as_json:
        print_json({"rows": [*map(plain, rows)], "layers": [*map(plain, layers)], "machine": facts})
        return
    print_table([*map(plain, layers)])
    print_rows(rows, facts, as_json=False)


def order(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = DEFAULT_MODEL,
    methods: Methods = "full,prefix,auto",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 36,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Chunks in the order that a search gives, and in those that begin as an earlier prompt."""
    from cached_rag import load_model
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from docs.experiments.order import bench_order

    loaded = load_model(model, **how)
    examples = [example for path in data for example in load_examples(path)[:limit]]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = bench_order(loaded, examples, folder, name=model, methods=names(methods))
    print_rows(rows, machine(loaded), as_json=as_json)


def chains(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = DEFAULT_MODEL,
    methods: Methods = "full,auto,fast,mapreduce,maprerank",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 24,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """All chunks in one prompt, beside chains that ask about each chunk alone."""
    from cached_rag import load_model
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from docs.experiments.map_reduce import bench_chains

    loaded = load_model(model, **how)
    examples = [example for path in data for example in load_examples(path)[:limit]]
    rows = bench_chains(loaded, examples, names(methods))
    print_rows(rows, machine(loaded), as_json=as_json)


def _print(rows: Sequence[Any], facts: Mapping[str, object], *, as_json: bool) -> None:
    """As `print_rows`, the table in Markdown."""
    if as_json:
        print_rows(rows, facts, as_json=True)
        return
    for line in markdown([plain(row) for row in rows]):
        out.print(line, soft_wrap=True)
    print_machine(facts)


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table, as the docs show it; columns named `..._bytes` are in MB."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        sizes = {name: f"{row[name] / 1e6:.0f} MB" for name in titles if name.endswith("_bytes")}
        lines.append([str(cell) for cell in {**row, **sizes}.values()])
    return [f"| {' | '.join(line)} |" for line in lines]
