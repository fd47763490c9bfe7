"""The command line: parses, calls the library, prints. Holds no logic of its own."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cached_rag import __version__
from cached_rag.cli.bench import bench_app
from cached_rag.cli.documents import delete_command, list_command
from cached_rag.cli.eval import evaluate_command
from cached_rag.cli.schema import schema_app
from cached_rag.cli.serve import serve_command
from cached_rag.cli.store import store_app
from cached_rag.cli.terminal import (
    DEFAULT_INDEX,
    Device,
    Dtype,
    Index,
    Json,
    Model,
    err,
    out,
    print_json,
    print_reports,
    require_index,
)
from cached_rag.errors import CachedRAGError

app = typer.Typer(
    help="Retrieval-augmented generation without prefilling the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(store_app, name="store")
app.add_typer(schema_app, name="schema")
app.add_typer(bench_app, name="bench")
app.command("list")(list_command)
app.command("delete")(delete_command)
app.command("eval")(evaluate_command)
app.command("serve")(serve_command)
Method = Annotated[str, typer.Option(help="auto, full, prefix, reuse, cacheblend, epic, ...")]
Ratio = Annotated[float | None, typer.Option(help="Share of cached tokens to recompute.")]


@app.command()
def ingest(
    path: Annotated[Path, typer.Argument(help="File or folder.")],
    index: Index = DEFAULT_INDEX,
    model: Model = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens of a chunk.")] = None,
    codec: Annotated[str | None, typer.Option(help="raw, or int8 for half the disk.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Encode chunks behind: primer, none, both, neighbours:N.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Call PATH so, not by its own name.")] = None,
    delete_missing: Annotated[bool, typer.Option(help="Drop documents gone from PATH.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Read, split, embed, index and prefill documents; again does only what is new."""
    from cached_rag import CachedRAG
    from cached_rag.rag import READERS

    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "codec": codec, "context": context}
    with CachedRAG.open(index, model, dtype=dtype, device=device, **options) as rag:
        summary = rag.ingest(path, name=name, delete_missing=delete_missing, progress=not as_json)
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    rate = f", {summary.tokens / summary.seconds:.0f} tokens/s" if summary.encoded else ""
    out.print(
        f"{summary.added} documents added, {summary.unchanged} unchanged, "
        f"{summary.deleted} deleted; {summary.chunks} chunks, "
        f"{summary.encoded} prefilled now ({summary.tokens} tokens{rate})"
    )
    for _, reason in summary.skipped:
        err.print(f"skipped {reason}", style="yellow", markup=False)
    if summary.passed_over:
        total = sum(count for _, count in summary.passed_over)
        kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in summary.passed_over)
        known = ", ".join(sorted(READERS))
        line = f"{total} files passed over: {kinds}; known kinds: {known}"
        err.print(line, style="yellow", markup=False, highlight=False)


@app.command()
def ask(
    question: str,
    index: Index = DEFAULT_INDEX,
    k: Annotated[int, typer.Option("-k", help="Chunks to retrieve.")] = 6,
    method: Method = "auto",
    ratio: Ratio = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 128,
    adaptive: Annotated[bool, typer.Option(help="Let the loading controller decide.")] = False,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    compare: Annotated[bool, typer.Option(help="Answer with full prefill, too.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Ask the documents of an index; the answer streams."""
    from cached_rag import CachedRAG, GenerationConfig

    require_index(index)
    config = GenerationConfig(
        method=method,
        recompute_ratio=ratio,
        adaptive=adaptive,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    with CachedRAG.open(index, dtype=dtype, device=device) as rag:
        stream = rag.stream(question, k=k, config=config)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False)
        answer = stream.answer
        full = rag.ask(question, k=k, config=config.replace(method="full")) if compare else None
    if as_json:
        found = {
            "text": answer.text,
            "sources": [dataclasses.asdict(hit) for hit in answer.sources],
            "report": answer.report.to_dict(),
        }
        if full is not None:
            found["full"] = {"text": full.text, "report": full.report.to_dict()}
        print_json(found)
        return
    out.print("\n")
    _print_sources(answer.sources)
    rows = [("cached", answer.report)] + ([("full prefill", full.report)] if full else [])
    print_reports(rows)
    for note in answer.report.notes:
        err.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if full is not None:
        out.print(f"Full prefill's answer: {full.text}", markup=False)


@app.command()
def demo(
    index: Index = Path("demo-index"),
    model: Model = None,
    codec: Annotated[str | None, typer.Option(help="raw or int8.")] = None,
) -> None:
    """Ingest eight PEPs, ask three questions, compare with full prefill."""
    from cached_rag.cli.demo import run_demo

    run_demo(index, model, codec, out)


@app.command()
def doctor(
    model: Model = None,
    index: Annotated[Path | None, typer.Option("--index", help="Also look at this index.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What this machine and model can do, with a self-test of exactness."""
    from cached_rag import CachedRAG, Engine
    from cached_rag.cli.doctor import examine

    if index is not None:
        require_index(index)
        with CachedRAG.open(index, model, dtype=dtype, device=device) as rag:
            facts = examine(rag.engine)
    else:
        with Engine.load(model or "smollm2-135m", dtype=dtype, device=device) as engine:
            facts = examine(engine)
    tests: Any = facts["self_test"]
    if as_json:
        print_json(facts)
    else:
        table = Table("what", "found")
        for name, value in facts.items():
            if name != "self_test":
                table.add_row(name, str(value))
        for test in tests:
            verdict = "passed" if test["passed"] else "FAILED"
            table.add_row(f"self-test: {test['name']}", f"{verdict}, error {test['error']:.1e}")
        out.print(table)
    if not all(test["passed"] for test in tests):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def main() -> None:
    """Run, turning this library's errors into one line and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)


def _print_sources(sources: Any) -> None:
    for hit in sources:
        out.print(f"  {hit}", style="dim", markup=False)
