"""`cached-rag bench`: times of each method, of the first token and of whole answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.demo import CORPUS
from cached_rag.cli.options import (
    BackendName,
    Device,
    Dtype,
    Methods,
    Model,
    NewTokens,
    Repeats,
    Weights,
    counts,
    names,
)
from cached_rag.cli.terminal import (
    Json,
    out,
    plain,
    print_json,
    print_machine,
    print_rows,
    print_table,
)
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import ConfigError

if TYPE_CHECKING:
    from cached_rag.evaluation.ttft import TtftRow


bench_app = typer.Typer(
    help="Measure speed, as ratios within one run. Without a command: time to first token of each "
    "method, against full prefill."
)


@bench_app.callback(invoke_without_command=True)
def ttft(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32,
    methods: Methods = "auto,fast,reuse",
    ratio: Annotated[float, typer.Option(help="Share of cached tokens to recompute.")] = 0.15,
    repeats: Repeats = 5,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    as_json: Json = False,
) -> None:
    """Time to first token of each method against full prefill, in one run."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from cached_rag import Engine
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.texts import NEW_PROMPTS
    from cached_rag.evaluation.ttft import bench_ingest, bench_ttft

    sizes: dict[str, Any] = {"modules": chunks, "module_tokens": chunk_tokens}
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
    if as_json:
        found = {"rows": [plain(row) for row in rows], "ingest": plain(encoding)}
        print_json(found | {"machine": facts})
        return
    print_table([_cells(row) for row in rows])
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
def answers(
    model: Model = DEFAULT_MODEL,
    methods: Methods = "full,auto",
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of prompts, comma-separated.")
    ] = "1024,4096",
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="About how many tokens a chunk has.")
    ] = 512,
    new_tokens: NewTokens = 64,
    texts: Annotated[Path, typer.Option(help="Folder of plain texts to cut chunks from.")] = CORPUS,
    repeats: Repeats = 3,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    as_json: Json = False,
) -> None:
    """Whole answers of each method over chunks of your texts.

    Beside transformers' own, if it runs the model.
    """
    from cached_rag import Engine, StoreConfig
    from cached_rag.evaluation.answers import bench_answers, joined, make_questions
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.peers import Own, Peer, Transformers

    lengths, corpus = counts(prompt_tokens, "prompt tokens"), joined(texts)
    # Nothing is kept of finished prompts, and nothing is computed while another one answers.
    store = StoreConfig(sequence_bytes=0, write_back=False, learn_prefixes=False)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how["backend"] = backend
    with Engine.load(model, store=store, **how) as engine:
        peers: dict[str, Peer] = {}
        if backend == "transformers":
            peers["transformers"] = Transformers(engine)
        peers |= {name: Own(engine, name) for name in names(methods)}
        sizes = {"chunk_tokens": chunk_tokens, "new_tokens": new_tokens, "rounds": repeats + 1}
        questions = make_questions(engine, corpus, lengths, **sizes)
        rows = [row for asked in questions for row in bench_answers(peers, asked, new_tokens)]
        about = {name: peer.about for name, peer in peers.items()}
        facts = machine(engine.model) | {"peers": about}
    print_rows(rows, facts, as_json=as_json)
