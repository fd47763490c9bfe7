"""`cached-rag explain`: what became of a question's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.ask import plainly
from cached_rag.cli.options import DEFAULT_INDEX, Index, answering, opened, opening, to_write
from cached_rag.cli.terminal import Json, out, print_json
from cached_rag.rag.folder import Reranking, Retrieval


def explain_command(
    question: str,
    index: Index = DEFAULT_INDEX,
    *,
    asked: Annotated[dict[str, Any], answering(Retrieval, max_tokens=128)],
    how: Annotated[dict[str, Any], opening(Reranking, sequence_bytes=0)],
    compare: Annotated[
        bool, typer.Option(help="Answer with full prefill, too, to have its time.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=to_write, help="Write a page to this file, the prompt coloured in it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask, and show what of the prompt was reused, moved, repaired and computed, and the times."""
    # As in `ask`: full prefill must not find what the first answer left.
    with opened(index, **how) as rag:
        answer = rag.ask(question, **asked)
        full = rag.ask(question, **plainly(asked)) if compare else None
    explanation = answer.explain(full)
    if html is not None:
        explanation.save(html)
    if as_json:
        print_json(explanation.to_dict())
    elif html is not None:
        out.print(f"written to {html}", markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(str(explanation), markup=False, highlight=False, soft_wrap=True)
