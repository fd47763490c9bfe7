"""`cached-rag store`: what an index keeps on disk. Loads no model."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from cached_rag.documents import DocumentIndex
from cached_rag.store import DiskStore
from cached_rag.terminal import DEFAULT_INDEX, Index, Json, out, print_json, require_index

store_app = typer.Typer(help="Look after the KV store of an index.", no_args_is_help=True)


@store_app.command()
def stats(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """How much KV an index holds."""
    with _disk_store(index) as store:
        facts = {
            "path": str(store.path),
            "codec": store.codec.name,
            "modules": len(store),
            "bytes": store.nbytes,
        }
    if as_json:
        print_json(facts)
    else:
        gib = int(str(facts["bytes"])) / 2**30
        out.print(
            f"{facts['modules']} modules, {gib:.2f} GiB, codec {facts['codec']}, in {facts['path']}"
        )


@store_app.command()
def verify(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """Read every KV file and report damage; exits 1 if there is any."""
    with _disk_store(index) as store:
        problems = store.check()
    if as_json:
        print_json({"problems": [dataclasses.asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            out.print(f"{problem.key}: {problem.reason}", markup=False)
        out.print(f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@store_app.command()
def prune(
    index: Index = DEFAULT_INDEX,
    max_bytes: Annotated[int | None, typer.Option(help="Bytes to keep at most.")] = None,
    as_json: Json = False,
) -> None:
    """Remove litter, and the least recently used KV beyond a bound."""
    with _disk_store(index) as store:
        count, freed = store.prune(max_bytes)
    if as_json:
        print_json({"files": count, "bytes": freed})
    else:
        out.print(f"{count} files removed, {freed / 2**20:.1f} MiB freed")


def _disk_store(index: Path) -> closing[DiskStore]:
    require_index(index)
    with closing(DocumentIndex(index / "documents.sqlite")) as documents:
        codec = documents.settings().get("codec", "raw")
    return closing(DiskStore(index / "kv", codec))
