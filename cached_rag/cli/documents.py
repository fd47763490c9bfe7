"""`cached-rag list`, `search` and `delete`: the documents of an index. Load no language model."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Annotated, Any

import typer

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    ENVIRONMENT,
    SETTLED,
    Index,
    filters,
    opened,
    require_index,
)
from cached_rag.cli.settings import OptionsOf
from cached_rag.cli.terminal import Json, out, print_json, print_table
from cached_rag.config import StoreConfig
from cached_rag.rag.document import shown
from cached_rag.rag.folder import IndexConfig, Reranking, Retrieval


def list_command(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """List the documents of an index, by the names that answers show and `delete` takes."""
    from cached_rag.rag.index import DocumentIndex

    require_index(index)
    with closing(DocumentIndex(index / "documents.sqlite")) as kept:
        documents = kept.documents()
    if as_json:
        print_json({"documents": [dataclasses.asdict(document) for document in documents]})
        return
    print_table(
        [
            {
                "source": shown(one.source),
                "title": shown(one.title),
                "chunks": one.chunks,
                "encoded": "yes" if one.is_encoded else "no",
            }
            for one in documents
        ]
    )


def search_command(
    question: str,
    index: Index = DEFAULT_INDEX,
    *,
    wanted: Annotated[
        dict[str, Any],
        OptionsOf(
            (Retrieval,),
            shown=("k", "where", "min_score"),
            only=("k", "where", "min_score"),
            parsers={"where": filters},
        ),
    ],
    how: Annotated[
        dict[str, Any],
        OptionsOf(
            (IndexConfig, Reranking), shown=("search", "reranker", "candidates"), but=SETTLED
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show the chunks nearest to a question."""
    with opened(index, **how) as rag:
        hits = rag.search(question, **wanted)
    if as_json:
        print_json({"hits": [dataclasses.asdict(hit) for hit in hits]})
        return
    if not hits:
        out.print("none")
    for hit in hits:
        out.print(f"{hit}", style="bold", markup=False, highlight=False)
        out.print(f"{hit.text}\n", markup=False, highlight=False)


def delete_command(
    sources: Annotated[list[str], typer.Argument(help="As `list` has them, or paths on disk.")],
    index: Index = DEFAULT_INDEX,
    *,
    how: Annotated[
        dict[str, Any],
        OptionsOf(
            (StoreConfig,),
            shown=("remote",),
            only=("remote", "remote_timeout"),
            environment=ENVIRONMENT,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Delete documents with their chunks and KV; if one is unknown, nothing is deleted."""
    with opened(index, **how) as rag:
        found = dict.fromkeys(rag.index.roots.find(source) for source in sources)
        deleted = [rag.delete(source) for source in found]
    if as_json:
        print_json({"deleted": [dataclasses.asdict(one) for one in deleted]})
        return
    for one in deleted:
        out.print(
            f"{shown(one.source)}: {one.chunks} chunks and {one.kvs} KVs deleted", markup=False
        )
