"""`cached-rag chat`: a conversation with an index."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.options import DEFAULT_INDEX, Index, answering, opened, opening
from cached_rag.cli.terminal import err, out
from cached_rag.errors import CachedRAGError
from cached_rag.rag.folder import Reranking, Retrieval

if TYPE_CHECKING:
    from cached_rag import Chat

_HELP = (
    "Ask; /new begins anew, /sources shows the last answer's chunks, /help says this again, /quit "
    "or an empty line ends. A question that begins with / is asked with a blank before it."
)


def chat_command(
    index: Index = DEFAULT_INDEX,
    *,
    asked: Annotated[dict[str, Any], answering(Retrieval, shown=("where", "temperature"))],
    how: Annotated[dict[str, Any], opening(Reranking)],
    condense: Annotated[
        bool, typer.Option(help="Let the model rewrite follow-up questions for the search.")
    ] = True,
) -> None:
    """Talk to the documents of an index; each turn's KV serves the next."""
    with opened(index, **how) as rag:

        def begin() -> Chat:
            return rag.chat(condense=condense, **asked)

        chat, has_failed = begin(), False
        err.print(_HELP, style="dim")
        while (said := _asked()).strip() and (command := said.rstrip()) != "/quit":
            if command == "/new":
                chat = begin()
            elif command == "/sources":
                _print_sources(chat)
            elif command.startswith("/"):
                if command != "/help":
                    err.print(f"there is no {command.split()[0]}", style="yellow", markup=False)
                err.print(_HELP, style="dim")
            else:
                has_failed = not _answer(chat, said.strip())
        if has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)


def _asked() -> str:
    """The next question; empty at the end of the input."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return ""


def _answer(chat: Chat, question: str) -> bool:
    """Stream an answer; an interrupt or an error ends it, and the conversation goes on.

    Returns:
        Whether there was no error.
    """
    try:
        stream = chat.stream(question)
        for piece in stream:
            out.print(piece, end="", markup=False, highlight=False)
    except KeyboardInterrupt:  # what there is of the answer is kept: the next question closes it
        out.print("\n")
        return True
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        return False
    answer = stream.answer
    out.print("\n")
    for hit in answer.sources:
        out.print(f"  {hit}", style="dim", markup=False)
    out.print(f"  {answer.report.to_line()}", style="dim", markup=False, highlight=False)
    for note in answer.report.notes:
        err.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    return True


def _print_sources(chat: Chat) -> None:
    for hit in chat.history[-1].sources if chat.history else ():
        out.print(f"{hit}\n{hit.text}\n", markup=False, highlight=False)
