"""`scale`: what 10^4 to 10^8 chunks cost, and which of them to keep."""

from __future__ import annotations

import tempfile
from typing import Annotated, Any

import typer

from cached_rag.cli.options import Loading, Model, numbers
from cached_rag.cli.terminal import Json, out, plain, print_json, print_machine, print_table
from cached_rag.config import DEFAULT_MODEL

_PRICE = "Dollars for a GB for a month"


def scale(
    model: Model = DEFAULT_MODEL,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Prefill of one worker; without it, it is measured here.")
    ] = None,
    token_bytes: Annotated[
        float | None, typer.Option(help="KV of a token on disk; without it, it is measured here.")
    ] = None,
    codec: Annotated[str, typer.Option(help="How KV is kept, if it is measured.")] = "raw",
    chunks: Annotated[
        str, typer.Option(help="Numbers of chunks, comma-separated.")
    ] = "1e4,1e5,1e6,1e7,1e8,1e9",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 256,
    workers: Annotated[int, typer.Option(min=1, help="How many workers prefill.")] = 16,
    worker_hour: Annotated[float, typer.Option(help="Dollars for a worker for an hour.")] = 0.1,
    memory: Annotated[float, typer.Option(help=f"{_PRICE} in memory.")] = 3.0,
    disk: Annotated[float, typer.Option(help=f"{_PRICE} on disk.")] = 0.08,
    objects: Annotated[float, typer.Option(help=f"{_PRICE} in an object store.")] = 0.023,
    read_gb_s: Annotated[float, typer.Option(help="GB a second at which KV is read back.")] = 1.0,
    answers: Annotated[float, typer.Option(help="Answers in a month.")] = 1e6,
    per_answer: Annotated[int, typer.Option("-k", min=1, help="Chunks of an answer.")] = 6,
    exponent: Annotated[
        float, typer.Option(help="Of Zipf's law: how much more often popular chunks are used.")
    ] = 1.0,
    kept: Annotated[
        str, typer.Option(help="Shares of chunks to keep in the replayed trace.")
    ] = "0.01,0.03,0.1,0.3",
    uses: Annotated[int, typer.Option(min=10, help="How long that trace is.")] = 400_000,
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 0,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """Hours, bytes and dollars of 10^4 to 10^8 chunks, and which of them to keep."""
    from cached_rag.evaluation.machine import machine
    from docs.experiments.popularity import hit_rates, moving, with_ingestion, zipf_trace
    from docs.experiments.scale import Constants, answer_seconds, places, scale_row

    if tokens_per_s is None or token_bytes is None:
        rate, weight = _measured(model, codec, chunk_tokens, how)
        tokens_per_s, token_bytes = tokens_per_s or rate, token_bytes or weight
    known = Constants(
        tokens_per_s,
        token_bytes,
        chunk_tokens=chunk_tokens,
        workers=workers,
        worker_hour=worker_hour,
        memory=memory,
        disk=disk,
        objects=objects,
        read_gb_s=read_gb_s,
    )
    counts = [round(n) for n in numbers(chunks, float, "chunks are numbers")]
    shares = numbers(kept, float, "shares are numbers")
    small = 20_000  # so that a trace is replayed in half a minute
    trace = zipf_trace(small, uses, exponent, seed)
    prefill_s, read_s = answer_seconds(known, per_answer)
    tables: dict[str, list[Any]] = {
        "scale": [scale_row(count, known) for count in counts],
        "places": places(counts, answers * per_answer, known, exponent),
        "hits": hit_rates(trace, small, shares, exponent),
        "moving": hit_rates(moving(trace, small), small, shares, exponent),
        "ingestion": hit_rates(with_ingestion(trace, small), small, shares, exponent),
    }
    if as_json:
        found = {name: [plain(row) for row in rows] for name, rows in tables.items()}
        seconds = {"prefill_s": prefill_s, "read_s": read_s}
        print_json({"constants": plain(known), **seconds, **found, "machine": machine()})
        return
    out.print(", ".join(f"{name} {value:g}" for name, value in plain(known).items()))
    out.print(
        f"the {per_answer} chunks of an answer: prefilled in {prefill_s:.3g} s, read in "
        f"{read_s:.3g} s"
    )
    _show("chunks, prefilled once and kept for a month; prices in dollars", tables["scale"])
    _show(f"chunks that earn their place, with {answers:g} answers a month", tables["places"])
    _show(f"hits in a trace of {uses} uses of {small} chunks, by share kept", tables["hits"])
    _show("the same, if what is popular changes", tables["moving"])
    _show("the same, if chunks come in that nobody asks for", tables["ingestion"])
    print_machine(machine())


def _show(title: str, rows: list[Any]) -> None:
    out.print(title)
    print_table([{name: _cell(value) for name, value in plain(row).items()} for row in rows])


def _cell(value: object) -> object:
    if not isinstance(value, (int, float)):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


def _measured(
    model: str, codec: str, chunk_tokens: int, how: dict[str, Any]
) -> tuple[float, float]:
    from cached_rag import Engine, StoreConfig
    from docs.experiments.scale import measured

    with tempfile.TemporaryDirectory() as folder:
        store = StoreConfig(path=folder, codec=codec)
        with Engine.load(model, store=store, **how) as engine:
            return measured(engine, chunk_tokens)
