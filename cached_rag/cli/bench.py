"""`cached-rag bench`: each command runs one benchmark and prints its figures."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.bench_answers import answers, chat, memory, weights_formats
from cached_rag.cli.bench_peers import peers_command
from cached_rag.cli.bench_quality import mixing, signals
from cached_rag.cli.bench_scale import scale
from cached_rag.cli.bench_stored import stored
from cached_rag.cli.options import (
    BackendName,
    Device,
    Drafts,
    Dtype,
    Methods,
    Model,
    NewTokens,
    Plot,
    Repeats,
    Weights,
    names,
    numbers,
)
from cached_rag.cli.terminal import (
    Json,
    out,
    plain,
    print_json,
    print_machine,
    print_markdown,
    print_rows,
    print_table,
)
from cached_rag.config import DEFAULT_MODEL
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
    chunks: Annotated[int, typer.Option("--chunks", "--modules", help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", "--module-tokens", help="Tokens of each chunk.")
    ] = 512,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
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


@bench_app.command()
def serving(
    model: Model = DEFAULT_MODEL,
    shared_tokens: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 2048,
    private_tokens: Annotated[int, typer.Option(help="Tokens of each prompt's own.")] = 128,
    requests: Annotated[
        str, typer.Option(help="Requests at the same time, comma-separated.")
    ] = "16",
    new_tokens: NewTokens = 32,
    methods: Annotated[
        str, typer.Option(help="Ways to serve, comma-separated.")
    ] = "relay,copied,recomputed,sequential",
    rates: Annotated[
        str,
        typer.Option(
            help="Send requests at random times instead: requests a second, comma-separated."
        ),
    ] = "",
    repeats: Repeats = 3,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    as_json: Json = False,
) -> None:
    """Many answers to prompts with one beginning: its KV shared, copied, recomputed, or in turn."""
    from cached_rag import load_model
    from cached_rag.backends.thread import submit
    from cached_rag.benchmarks import bench_arrivals, bench_serving, machine

    loaded = submit(lambda: load_model(model, dtype, device, weights)).result()
    counts = numbers(requests, int, "requests are whole numbers")
    options: dict[str, Any] = {
        "shared_tokens": shared_tokens,
        "private_tokens": private_tokens,
        "new_tokens": new_tokens,
        "methods": names(methods),
    }
    rows: list[Any] = []
    if rates:
        given = numbers(rates, float, "rates are numbers")
        rows += bench_arrivals(loaded, given, requests=counts[0], **options)
    else:
        for count in counts:
            timing = partial(bench_serving, loaded, requests=count, repeats=repeats, **options)
            rows += submit(timing).result()
    print_rows(rows, machine(loaded), as_json=as_json)


@bench_app.command()
def attention(
    model: Model = DEFAULT_MODEL,
    batches: Annotated[
        str, typer.Option(help="Answers in a batch, comma-separated.")
    ] = "1,4,8,16,32",
    shared_tokens: Annotated[
        str, typer.Option(help="Tokens that all answers share, comma-separated.")
    ] = "512,1024,2048,4096",
    private_tokens: Annotated[int, typer.Option(help="Tokens of each answer's own.")] = 128,
    plot: Plot = None,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    as_json: Json = False,
) -> None:
    """One layer's attention, shared KV read once or copied; beside it RelayAttention's theory."""
    from cached_rag import load_model
    from cached_rag.benchmarks import bench_attention, machine, plot_attention, query_heads

    loaded = load_model(model, dtype, device, weights)
    rows = bench_attention(
        loaded.shapes,
        query_heads(loaded),
        batches=numbers(batches, int, "batches are whole numbers"),
        lengths=numbers(shared_tokens, int, "shared tokens are whole numbers"),
        private_tokens=private_tokens,
    )
    if plot is not None:
        plot_attention(rows, plot)
    print_rows(rows, machine(loaded), as_json=as_json)


@bench_app.command()
def kernels(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[
        str, typer.Option(help="Tokens that attend, comma-separated.")
    ] = "1,2,4,8,16,32,64,128",
    keys: Annotated[
        str, typer.Option(help="Keys that they attend to, comma-separated.")
    ] = "256,512,1024,1536,2048,3072,4096,8192",
    repeats: Repeats = 15,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    as_json: Json = False,
) -> None:
    """Attention over keys that all tokens see: torch's flash kernel against matrix products."""
    from cached_rag import load_model
    from cached_rag.benchmarks import bench_kernels, machine, query_heads

    loaded = load_model(model, dtype, device, weights)
    rows = bench_kernels(
        loaded.shapes,
        query_heads(loaded),
        tokens=numbers(tokens, int, "tokens are whole numbers"),
        keys=numbers(keys, int, "keys are whole numbers"),
        repeats=repeats,
    )
    print_rows(rows, machine(loaded), as_json=as_json)


@bench_app.command()
def traffic(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = DEFAULT_MODEL,
    methods: Methods = "full,prefix,auto",
    limit: Annotated[int, typer.Option(help="Questions of each set.")] = 24,
    clients: Annotated[
        str, typer.Option(help="How many ask at the same time, comma-separated.")
    ] = "4",
    shared_chunks: Annotated[
        int, typer.Option(help="Draw each question's chunks from the first so many of its set.")
    ] = 0,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    drafts: Drafts = True,
    vllm: Annotated[
        str | None, typer.Option(help="Address of a vLLM server, which is asked, too.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    as_json: Json = False,
) -> None:
    """Several clients with questions over shared chunks: requests a second, time to first token."""
    from cached_rag import Engine
    from cached_rag.benchmarks import NEW_PROMPTS, bench_traffic, drawn, machine
    from cached_rag.benchmarks.peers.vllm import Vllm
    from cached_rag.evaluation import load_examples

    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how["backend"] = backend
    counts = numbers(clients, int, "clients are whole numbers")
    server = Vllm(vllm) if vllm else None
    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        rows = []
        for path in data:
            loaded = load_examples(path, limit)
            examples: list[tuple[Sequence[str], str]] = [(e.chunks, e.question) for e in loaded]
            if shared_chunks:
                examples = drawn(examples, shared_chunks)
            rows += bench_traffic(
                engine,
                examples,
                name=path.stem,
                methods=names(methods),
                clients=counts,
                new_tokens=new_tokens,
                drafts=drafts,
                vllm=server,
            )
        facts = machine(engine.model)
    print_rows(rows, facts, as_json=as_json)


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


bench_app.command()(answers)
bench_app.command("peers")(peers_command)
bench_app.command()(mixing)
bench_app.command()(signals)
bench_app.command()(memory)
bench_app.command()(chat)
bench_app.command()(scale)
bench_app.command()(stored)
bench_app.command("weights")(weights_formats)
