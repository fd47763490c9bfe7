"""`cached-rag bench`: each command runs one benchmark and prints its figures."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.bench_answers import answers, chat, memory, weights_formats
from cached_rag.cli.bench_peers import peers_command
from cached_rag.cli.bench_quality import mixing, signals
from cached_rag.cli.bench_scale import scale
from cached_rag.cli.bench_serving import attention, kernels, serving, traffic
from cached_rag.cli.bench_stored import stored
from cached_rag.cli.options import (
    BackendName,
    Device,
    Dtype,
    Methods,
    Model,
    Repeats,
    Weights,
    names,
)
from cached_rag.cli.terminal import (
    Json,
    out,
    plain,
    print_json,
    print_machine,
    print_markdown,
    print_table,
)
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import ConfigError

if TYPE_CHECKING:
    from cached_rag.benchmarks.ttft import TtftRow


bench_app = typer.Typer(
    help="Measure speed, as ratios within one run. Without a command: time to first token of each "
    "method, against full prefill."
)


@bench_app.callback(invoke_without_command=True)
def ttft(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    chunks: Annotated[
        int, typer.Option("--chunks", "--modules", min=1, help="Chunks in the prompt.")
    ] = 8,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", "--module-tokens", min=1, help="Tokens of each chunk.")
    ] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32,
    methods: Methods = "reuse,cacheblend",
    ratio: Annotated[float, typer.Option(help="Share of cached tokens to recompute.")] = 0.15,
    repeats: Repeats = 5,
    loading: Annotated[
        bool, typer.Option(help="Also time KV on disk, in a temporary folder below this one.")
    ] = False,
    remote: Annotated[
        str | None, typer.Option(help="With --loading: also time this store on another machine.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    as_json: Json = False,
) -> None:
    """Time to first token of each method against full prefill, in one run."""
    if remote is not None and not loading:
        raise ConfigError("--remote belongs to --loading")
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from cached_rag import Engine
    from cached_rag.benchmarks import (
        NEW_PROMPTS,
        bench_ingest,
        bench_loading,
        bench_ttft,
        machine,
    )

    sizes: dict[str, Any] = {"modules": chunks, "module_tokens": chunk_tokens}
    stored = []
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how["backend"] = backend
    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        rows = bench_ttft(
            engine,
            **sizes,
            question_tokens=question_tokens,
            methods=names(methods),
            ratio=ratio,
            repeats=repeats,
        )
        encoding = bench_ingest(engine, **sizes)
        facts = machine(engine.model)
        if loading:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                stored = bench_loading(
                    engine.model, Path(folder), **sizes, repeats=repeats, remote=remote
                )
    if as_json:
        found: dict[str, Any] = {"rows": [plain(row) for row in rows], "ingest": plain(encoding)}
        found |= {"loading": [plain(row) for row in stored]} if loading else {}
        print_json(found | {"machine": facts})
        return
    print_table([_cells(row) for row in rows])
    for timed in stored:
        out.print(f"{timed.method}, KV in {timed.loading}: {timed.ttft_ms:.1f} ms")
    out.print(
        f"ingestion: {encoding.tokens_per_s:.0f} tokens/s, {encoding.ratio:.2f}x the model's own "
        f"batched prefill"
    )
    print_machine(facts)


def _cells(row: TtftRow) -> dict[str, object]:
    return {
        "method": row.method,
        "tokens": row.prompt_tokens,
        "TTFT ms": f"{row.ttft_ms:.1f}",
        "speed-up": f"{row.speedup:.1f}x",
        "charged": f"{row.charged_recompute:.3f}",
        "overhead ms": f"{row.overhead_ms:.1f}",
    }


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of this command that stand before another one, which would not have them."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, at in sources.items() if at is not None and at.name == "COMMANDLINE"]
    if given:
        raise ConfigError(
            f"{', '.join(given)} stand before {context.invoked_subcommand}, which has options of "
            "its own; put them behind it"
        )


@bench_app.command("models")
def models(
    models: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Aliases, Hugging Face ids, folders, .gguf files."),
    ],
    repeats: Repeats = 3,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    as_json: Json = False,
) -> None:
    """Loading, memory, speed and methods of models, each in its own process (docs/models.md)."""
    from cached_rag.benchmarks import bench_models, machine

    rows = bench_models(models, dtype=dtype, device=device, weights=weights, repeats=repeats)
    print_markdown(rows, machine(), as_json=as_json)


@bench_app.command()
def architectures(as_json: Json = False) -> None:
    """Which methods each architecture has, or why it is refused; tried on tiny random models."""
    from cached_rag.benchmarks import bench_architectures, machine

    print_markdown(bench_architectures(), machine(), as_json=as_json)


for command in (serving, attention, kernels, traffic, answers, mixing, signals, memory, chat):
    bench_app.command()(command)
bench_app.command("peers")(peers_command)
bench_app.command()(scale)
bench_app.command()(stored)
bench_app.command("weights")(weights_formats)
