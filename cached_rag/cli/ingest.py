"""`cached-rag ingest`: documents into an index."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    BackendName,
    Codec,
    Device,
    Dtype,
    Index,
    IndexModel,
    Weights,
)
from cached_rag.cli.terminal import Json, err, out, print_json

if TYPE_CHECKING:
    from cached_rag import IngestSummary


def ingest_command(
    path: Annotated[Path, typer.Argument(help="File or folder.")],
    index: Index = DEFAULT_INDEX,
    model: IndexModel = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens of a chunk.")] = None,
    codec: Codec = None,
    context: Annotated[
        str | None, typer.Option(help="Encode chunks behind: primer, none, both, neighbours:N.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of PATH in the index; its own by default.")
    ] = None,
    delete_missing: Annotated[bool, typer.Option(help="Drop documents gone from PATH.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    as_json: Json = False,
) -> None:
    """Read, split, embed, index and prefill documents; what the index has already is skipped."""
    from cached_rag import CachedRAG

    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "codec": codec, "context": context}
    with CachedRAG.open(
        index, model, dtype=dtype, device=device, weights=weights, backend=backend, **options
    ) as rag:
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
    _print_left_out(summary)


def _print_left_out(summary: IngestSummary) -> None:
    """Print which files could not be read, and which are of no known kind."""
    from cached_rag.rag import READERS

    for _, reason in summary.skipped:
        err.print(f"skipped {reason}", style="yellow", markup=False)
    if summary.passed_over:
        total = sum(count for _, count in summary.passed_over)
        kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in summary.passed_over)
        known = ", ".join(sorted(READERS))
        line = f"{total} files passed over: {kinds}; known kinds: {known}"
        err.print(line, style="yellow", markup=False, highlight=False)
