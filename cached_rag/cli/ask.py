"""`cached-rag ask`, `search`, `chat` and `explain`: questions to an index."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

import cached_rag
from cached_rag.cli import options, terminal
from cached_rag.cli.terminal import Json, err, out
from cached_rag.errors import CachedRAGError
from cached_rag.rag.folder import IndexConfig, Reranking, Retrieval
from cached_rag.rag.index import CHANGEABLE

# For the one question there is; and full prefill, to compare it with, must not find what it left.
_ONCE = options.opening(sequence_bytes=0)
Compare = Annotated[bool, typer.Option(help="Answer with full prefill, too, which reuses nothing.")]
_HELP = (
    "Ask; /new begins anew, /sources shows the last answer's chunks, /help says this again, /quit "
    "or an empty line ends. A question that begins with / is asked with a blank before it."
)


def ask_command(
    question: str,
    index: options.Index = options.DEFAULT_INDEX,
    *,
    asked: Annotated[
        options.Given, options.answering(Retrieval, shown=("where", "temperature"), max_tokens=128)
    ],
    how: Annotated[options.Given, _ONCE],
    compare: Compare = False,
    as_json: Json = False,
) -> None:
    """Ask the documents of an index; the answer streams."""
    with options.opened(index, **how) as rag:
        stream = rag.stream(question, **asked)
        terminal.print_pieces(stream, are_shown=not as_json)
        answer = stream.answer
        full = rag.ask(question, **plainly(asked)) if compare else None
    terminal.print_answer(answer, full, sources=answer.sources, as_json=as_json)


def plainly(asked: options.Given) -> options.Given:
    """The same with full prefill, which has no options."""
    return {n: v for n, v in asked.items() if n not in options.OF_METHODS} | {"method": "full"}


def explain_command(
    question: str,
    index: options.Index = options.DEFAULT_INDEX,
    *,
    asked: Annotated[options.Given, options.answering(Retrieval, max_tokens=128)],
    how: Annotated[options.Given, _ONCE],
    compare: Compare = False,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=options.to_write, help="Write a page to this file, the prompt coloured in it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask, and show what of the prompt was reused, moved, repaired and computed, and the times."""
    with options.opened(index, **how) as rag:
        answer = rag.ask(question, **asked)
        full = rag.ask(question, **plainly(asked)) if compare else None
    explanation = answer.explain(full)
    if html is not None:
        explanation.save(html)
    if as_json:
        terminal.print_json(explanation.to_dict())
    elif html is not None:
        out.print(f"written to {html}", soft_wrap=True)
    else:
        out.print(str(explanation), soft_wrap=True)


def search_command(
    question: str,
    index: options.Index = options.DEFAULT_INDEX,
    *,
    wanted: Annotated[
        options.Given,
        options.OptionsOf((Retrieval,), only=("k", "where", "min_score")),
    ],
    how: Annotated[
        options.Given,
        options.OptionsOf(
            (IndexConfig, Reranking),
            shown=("search", "reranker", "candidates"),
            but=options.SETTLED,
            recalled=CHANGEABLE,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show the chunks nearest to a question."""
    with options.opened(index, **how) as rag:
        hits = rag.search(question, **wanted)
    if as_json:
        terminal.print_json({"hits": [dataclasses.asdict(hit) for hit in hits]})
        return
    if not hits:
        out.print("none")
    for hit in hits:
        out.print(f"{hit}", style="bold")
        out.print(f"{hit.text}\n")


def chat_command(
    index: options.Index = options.DEFAULT_INDEX,
    *,
    asked: Annotated[options.Given, options.answering(Retrieval, shown=("where", "temperature"))],
    how: Annotated[options.Given, options.opening()],
    condense: Annotated[
        bool, typer.Option(help="Let the model rewrite follow-up questions for the search.")
    ] = True,
) -> None:
    """Talk to the documents of an index; each turn's KV serves the next."""
    with options.opened(index, **how) as rag:
        chat, has_failed = rag.chat(condense=condense, **asked), False
        err.print(_HELP, style="dim")
        while (said := _asked()).strip() and (command := said.rstrip()) != "/quit":
            if command == "/new":
                chat = rag.chat(condense=condense, **asked)
            elif command == "/sources":
                for hit in chat.history[-1].sources if chat.history else ():
                    out.print(f"{hit}\n{hit.text}\n")
            elif command.startswith("/"):
                if command != "/help":
                    err.print(f"there is no {command.split()[0]}", style="yellow")
                err.print(_HELP, style="dim")
            else:
                has_failed = not _answer(chat, said.strip())
        if has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)


def _asked() -> str:
    """The next question; empty at the end of the input, or if there is none."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt, RuntimeError):
        return ""


def _answer(chat: cached_rag.Chat, question: str) -> bool:
    """Stream an answer; an interrupt or an error ends it, and the conversation goes on.

    Returns:
        Whether there was no error.
    """
    try:
        stream = chat.stream(question)
        terminal.print_pieces(stream)
    except KeyboardInterrupt:  # what there is of the answer is kept: the next question closes it
        out.print("\n")
        return True
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red")
        return False
    answer = stream.answer
    out.print("\n")
    terminal.print_hits(answer.sources)
    out.print(f"  {answer.report.to_line()}", style="dim")
    terminal.print_notes(answer.report)
    return True
