"""`cached-rag bench`: parses, calls the benchmarks, prints. Holds no logic of its own."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cached_rag.cli.terminal import Device, Dtype, Json, Model, out, print_json

bench_app = typer.Typer(help="Speed, as ratios within one run.")


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = None,
    modules: Annotated[int, typer.Option(help="Modules in the prompt.")] = 8,
    module_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "reuse,cacheblend",
    ratio: Annotated[float, typer.Option(help="Share to recompute.")] = 0.15,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    loading: Annotated[bool, typer.Option(help="Also time KV on the disk of this folder.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Time to first token of each method against full prefill, in one run."""
    if context.invoked_subcommand is not None:
        return
    from cached_rag import Engine
    from cached_rag.benchmarks import bench_ingest, bench_ttft, machine

    with Engine.load(model or "smollm2-135m", dtype=dtype, device=device) as engine:
        rows = bench_ttft(
            engine,
            modules=modules,
            module_tokens=module_tokens,
            question_tokens=question_tokens,
            methods=methods.split(","),
            ratio=ratio,
            repeats=repeats,
        )
        encoding = bench_ingest(engine, modules=modules, module_tokens=module_tokens)
        facts = machine(engine.model)
        stored = _bench_loading(engine, modules, module_tokens, repeats) if loading else []
    if as_json:
        table_rows = [dataclasses.asdict(row) for row in rows]
        ingestion = dataclasses.asdict(encoding)
        found: dict[str, Any] = {"rows": table_rows, "ingest": ingestion, "machine": facts}
        print_json(
            found | ({"loading": [dataclasses.asdict(row) for row in stored]} if loading else {})
        )
        return
    table = Table("method", "tokens", "TTFT ms", "speed-up", "charged", "overhead ms")
    for row in rows:
        table.add_row(
            row.method,
            str(row.prompt_tokens),
            f"{row.ttft_ms:.1f}",
            f"{row.speedup:.1f}x",
            f"{row.charged_recompute:.3f}",
            f"{row.overhead_ms:.1f}",
        )
    out.print(table)
    for timed in stored:
        out.print(f"{timed.method}, KV in {timed.loading}: {timed.ttft_ms:.1f} ms")
    out.print(
        f"ingestion: {encoding.tokens_per_s:.0f} tokens/s, {encoding.ratio:.2f}x the model's own "
        f"batched prefill"
    )
    out.print(json.dumps(facts), style="dim", markup=False)


def _bench_loading(engine: Any, modules: int, module_tokens: int, repeats: int) -> list[Any]:
    from cached_rag.benchmarks import bench_loading

    with tempfile.TemporaryDirectory(dir=".") as folder:
        return bench_loading(
            engine.model,
            Path(folder),
            modules=modules,
            module_tokens=module_tokens,
            repeats=repeats,
        )


@bench_app.command()
def serving(
    model: Model = None,
    shared_tokens: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 2048,
    private_tokens: Annotated[int, typer.Option(help="Tokens of each prompt's own.")] = 128,
    requests: Annotated[str, typer.Option(help="At once; several comma-separated.")] = "16",
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    methods: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "relay,copied,recomputed,sequential",
    rates: Annotated[str, typer.Option(help="Instead: arrivals a second, comma-separated.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answers over a shared beginning: relayed, over copies, recomputed, one after another."""
    from cached_rag import load_model
    from cached_rag.backends.thread import submit
    from cached_rag.benchmarks import bench_arrivals, bench_serving, machine

    loaded = submit(lambda: load_model(model or "smollm2-135m", dtype, device)).result()
    counts, chosen = _counts(requests), methods.split(",")
    rows: list[Any] = []
    if rates:
        given = [float(rate) for rate in rates.split(",")]
        rows += bench_arrivals(
            loaded,
            given,
            shared_tokens=shared_tokens,
            private_tokens=private_tokens,
            requests=counts[0],
            new_tokens=new_tokens,
            methods=chosen,
        )
    else:
        for count in counts:
            timing = partial(
                bench_serving,
                loaded,
                shared_tokens=shared_tokens,
                private_tokens=private_tokens,
                requests=count,
                new_tokens=new_tokens,
                repeats=repeats,
                methods=chosen,
            )
            rows += submit(timing).result()
    _show(rows, machine(loaded), as_json)


@bench_app.command()
def attention(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Rows, comma-separated.")] = "1,4,8,16,32",
    shared_tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "512,1024,2048,4096",
    private_tokens: Annotated[int, typer.Option(help="Tokens of each row's own.")] = 128,
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-ups here.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """One layer's attention, relayed and over copies, beside equation 10 of RelayAttention."""
    from cached_rag import load_model
    from cached_rag.benchmarks import bench_attention, machine, plot_attention

    loaded = load_model(model or "smollm2-135m", dtype, device)
    heads = loaded.decoder.model.config.get_text_config().num_attention_heads
    rows = bench_attention(
        loaded.shapes,
        heads,
        batches=_counts(batches),
        lengths=_counts(shared_tokens),
        private_tokens=private_tokens,
    )
    if plot is not None:
        plot_attention(rows, plot)
    _show(rows, machine(loaded), as_json)


@bench_app.command()
def kernels(
    model: Model = None,
    tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8,16,32,64,128",
    keys: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "256,512,1024,1536,2048,3072,4096,8192",
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Attention over keys that all tokens see: torch's flash kernel against matrix products."""
    from cached_rag import load_model
    from cached_rag.benchmarks import bench_kernels, machine

    loaded = load_model(model or "smollm2-135m", dtype, device)
    heads = loaded.decoder.model.config.get_text_config().num_attention_heads
    counts = {"tokens": _counts(tokens), "keys": _counts(keys)}
    rows = bench_kernels(loaded.shapes, heads, **counts, repeats=repeats)
    _show(rows, machine(loaded), as_json)


@bench_app.command()
def traffic(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "full,prefix,auto",
    limit: Annotated[int, typer.Option(help="Questions of each set.")] = 24,
    clients: Annotated[int, typer.Option(help="Who ask at the same time.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Questions over shared chunks as a stream: requests a second, time to first token."""
    from cached_rag import Engine
    from cached_rag.benchmarks import bench_traffic, machine
    from cached_rag.evaluation.data import load_examples

    with Engine.load(model or "smollm2-135m", dtype=dtype, device=device) as engine:
        rows = []
        for path in data:
            examples = [(e.chunks, e.question) for e in load_examples(path, limit)]
            rows += bench_traffic(
                engine,
                examples,
                name=path.stem,
                methods=methods.split(","),
                clients=clients,
                new_tokens=new_tokens,
            )
        facts = machine(engine.model)
    _show(rows, facts, as_json)


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _show(rows: Sequence[Any], facts: dict[str, object], as_json: bool) -> None:
    """Rows of one kind as a table, or as JSON."""
    found = [dataclasses.asdict(row) for row in rows]
    if as_json:
        print_json({"rows": found, "machine": facts})
        return
    table = Table(*(name.replace("_", " ") for name in found[0]))
    for row in found:
        table.add_row(*map(str, row.values()))
    out.print(table)
    out.print(json.dumps(facts), style="dim", markup=False)


@bench_app.command("models")
def bench_models_command(
    names: Annotated[list[str], typer.Argument(help="Aliases, hub ids, folders or .gguf files.")],
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What models take and can do, each in a process of its own: the table of docs/models.md."""
    from cached_rag.benchmarks import bench_models, machine

    rows = bench_models(names, dtype=dtype, device=device, repeats=repeats)
    _print_rows(rows, machine(), as_json)


@bench_app.command("architectures")
def bench_architectures_command(as_json: Json = False) -> None:
    """By architecture, what works and what is refused and why, from tiny random models."""
    from cached_rag.benchmarks import bench_architectures, machine

    _print_rows(bench_architectures(), machine(), as_json)


def _print_rows(rows: Sequence[Any], facts: dict[str, object], as_json: bool) -> None:
    """Rows as a Markdown table, or all as JSON, with the machine."""
    from cached_rag.benchmarks import to_markdown

    if as_json:
        print_json({"rows": [dataclasses.asdict(row) for row in rows], "machine": facts})
        return
    out.print(to_markdown(rows), markup=False, highlight=False, soft_wrap=True)
    out.print(json.dumps(facts), style="dim", markup=False)
