"""`cached-rag ask`: a question to an index."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from cached_rag.cli.options import DEFAULT_INDEX, Index, answering, opened, opening
from cached_rag.cli.terminal import Json, err, out, print_json, print_reports
from cached_rag.rag.folder import Reranking, Retrieval

# What full prefill has not.
_OF_METHODS = ("method", "quality", "recompute_ratio", "adaptive")


def ask_command(
    question: str,
    index: Index = DEFAULT_INDEX,
    *,
    asked: Annotated[
        dict[str, Any], answering(Retrieval, shown=("where", "temperature"), max_tokens=128)
    ],
    # The one question there is; and full prefill, to compare it with, must not find what it left.
    how: Annotated[dict[str, Any], opening(Reranking, sequence_bytes=0)],
    compare: Annotated[
        bool, typer.Option(help="Answer with full prefill, too, which reuses nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask the documents of an index; the answer streams."""
    with opened(index, **how) as rag:
        stream = rag.stream(question, **asked)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False)
        answer = stream.answer
        full = rag.ask(question, **plainly(asked)) if compare else None
    if as_json:
        found: dict[str, Any] = {
            "text": answer.text,
            "sources": [dataclasses.asdict(hit) for hit in answer.sources],
            "report": answer.report.to_dict(),
        }
        if full is not None:
            found["full"] = {"text": full.text, "report": full.report.to_dict()}
        print_json(found)
        return
    out.print("\n")
    for hit in answer.sources:
        out.print(f"  {hit}", style="dim", markup=False)
    print_reports([("cached", answer.report)] + ([("full prefill", full.report)] if full else []))
    for note in answer.report.notes:
        err.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if full is not None:
        out.print(f"Full prefill's answer: {full.text}", markup=False)


def plainly(asked: dict[str, Any]) -> dict[str, Any]:
    """The same with full prefill, which has no options."""
    return {n: v for n, v in asked.items() if n not in _OF_METHODS} | {"method": "full"}
