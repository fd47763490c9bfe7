"""many requests at once, and what their attention costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.options import Loading, Model, names, numbers
from cached_rag.cli.terminal import Json
from cached_rag.config import DEFAULT_MODEL
from docs.experiments.commands import Loaded, Methods, NewTokens, Plot, Repeats, counts, print_rows


def serving(
    model: Model = DEFAULT_MODEL,
    shared_tokens: Annotated[
        str, typer.Option(help="Tokens that all prompts begin with, comma-separated.")
    ] = "2048",
    private_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own.")] = 128,
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
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Many answers to prompts with one beginning: its KV shared, copied, recomputed, or in turn."""
    from cached_rag import load_model
    from cached_rag.backends.thread import submit
    from cached_rag.evaluation.machine import machine
    from docs.experiments.serving import bench_arrivals, bench_serving

    loaded = submit(lambda: load_model(model, **how)).result()
    together = counts(requests, "requests")
    lengths = counts(shared_tokens, "shared tokens")
    options: dict[str, Any] = {
        "private_tokens": private_tokens,
        "new_tokens": new_tokens,
        "methods": names(methods),
    }
    rows: list[Any] = []
    if rates:
        given = numbers(rates, float, "rates are numbers")
        options |= {"shared_tokens": lengths[0], "requests": together[0]}
        rows += bench_arrivals(loaded, given, **options)
    else:
        for length, count in product(lengths, together):
            sizes: dict[str, Any] = {"shared_tokens": length, "requests": count, "repeats": repeats}
            rows += submit(partial(bench_serving, loaded, **sizes, **options)).result()
    print_rows(rows, machine(loaded), as_json=as_json)


def mmlu(
    folder: Annotated[Path, typer.Argument(help="MMLU's folder, of dev and test.")],
    subjects: Annotated[str, typer.Option(help="Subjects, comma-separated.")] = "virology",
    model: Model = DEFAULT_MODEL,
    shots: Annotated[str, typer.Option(help="Examples before a question, 1 to 5 each.")] = "5",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each subject.")] = 16,
    methods: Annotated[
        str, typer.Option(help="Ways to serve, comma-separated.")
    ] = "relay,copied,recomputed",
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """MMLU's questions by examples that they share: right answers, and the time for all."""
    from cached_rag import load_model
    from cached_rag.backends.thread import submit
    from cached_rag.evaluation.machine import machine
    from docs.experiments.mmlu import bench_mmlu

    loaded = submit(lambda: load_model(model, **how)).result()
    rows: list[Any] = []
    for count in counts(shots, "shots"):
        asked: dict[str, Any] = {"shots": count, "limit": limit, "methods": names(methods)}
        rows += submit(partial(bench_mmlu, loaded, folder, names(subjects), **asked)).result()
    print_rows(rows, machine(loaded), as_json=as_json)


def attention(
    model: Model = DEFAULT_MODEL,
    batches: Annotated[
        str, typer.Option(help="Answers in a batch, comma-separated.")
    ] = "1,4,8,16,32",
    shared_tokens: Annotated[
        str, typer.Option(help="Tokens that all answers share, comma-separated.")
    ] = "512,1024,2048,4096",
    private_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer's own.")] = 128,
    plot: Plot = None,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """One layer's attention, shared KV read once or copied; beside it RelayAttention's theory."""
    from cached_rag import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.attention import bench_attention, plot_attention, query_heads

    loaded = load_model(model, **how)
    rows = bench_attention(
        loaded.shapes,
        query_heads(loaded),
        batches=counts(batches, "batches"),
        lengths=counts(shared_tokens, "shared tokens"),
        private_tokens=private_tokens,
    )
    if plot is not None:
        plot_attention(rows, plot)
    print_rows(rows, machine(loaded), as_json=as_json)


def kernels(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[
        str, typer.Option(help="Tokens that attend, comma-separated.")
    ] = "1,2,4,8,16,32,64,128",
    keys: Annotated[
        str, typer.Option(help="Keys that they attend to, comma-separated.")
    ] = "256,512,1024,1536,2048,3072,4096,8192",
    repeats: Repeats = 15,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Attention over keys that all tokens see: torch's flash kernel against matrix products."""
    from cached_rag import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.attention import query_heads
    from docs.experiments.kernels import bench_kernels

    loaded = load_model(model, **how)
    rows = bench_kernels(
        loaded.shapes,
        query_heads(loaded),
        tokens=counts(tokens, "tokens"),
        keys=counts(keys, "keys"),
        repeats=repeats,
    )
    print_rows(rows, machine(loaded), as_json=as_json)


def traffic(
    data: Annotated[list[Path], typer.Argument(help="Question sets (.jsonl).")],
    model: Model = DEFAULT_MODEL,
    methods: Methods = "full,prefix,auto",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 24,
    clients: Annotated[
        str, typer.Option(help="How many ask at the same time, comma-separated.")
    ] = "4",
    rates: Annotated[
        str, typer.Option(help="Instead, requests a second that arrive, comma-separated.")
    ] = "",
    memory_mb: Annotated[
        int, typer.Option(min=1, help="Room for KV; of more, what nobody asks for leaves.")
    ] = 2048,
    shared_chunks: Annotated[
        int,
        typer.Option(min=0, help="Draw each question's chunks from so many of its set."),
    ] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    drafts: Annotated[bool, typer.Option(help="See GenerationConfig.")] = True,
    vllm: Annotated[
        str | None, typer.Option(help="Address of a vLLM server, which is asked, too.")
    ] = None,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """Several clients with questions over shared chunks: requests a second, time to first token."""
    from cached_rag import Engine
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS
    from docs.experiments.peers.vllm import Vllm
    from docs.experiments.traffic import bench_traffic, drawn

    together = counts(clients, "clients")
    arriving = numbers(rates, float, "rates are numbers") if rates else []
    server = Vllm(vllm) if vllm else None
    store = replace(NEW_PROMPTS, memory_bytes=memory_mb << 20)
    with Engine.load(model, store=store, **how) as engine:
        rows = []
        for path in data:
            loaded = load_examples(path)[:limit]
            examples: list[tuple[Sequence[str], str]] = [(e.chunks, e.question) for e in loaded]
            if shared_chunks:
                examples = drawn(examples, shared_chunks)
            rows += bench_traffic(
                engine,
                examples,
                name=path.stem,
                methods=names(methods),
                clients=together,
                rates=arriving,
                new_tokens=new_tokens,
                drafts=drafts,
                vllm=server,
            )
        facts = machine(engine.model)
    print_rows(rows, facts, as_json=as_json)
