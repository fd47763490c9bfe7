"""`cached-rag chat`: a conversation with an index."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    BackendName,
    Device,
    Drafts,
    Dtype,
    Index,
    MaxTokens,
    Method,
    Remote,
    RerankerName,
    Retrieved,
    SearchBy,
    Seed,
    Temperature,
    Weights,
    Where,
    filters,
    opened,
)
from cached_rag.cli.terminal import err, out
from cached_rag.errors import CachedRAGError

if TYPE_CHECKING:
    from cached_rag import Chat

_HELP = "Ask; /new begins anew, /sources shows the last answer's chunks, an empty line ends."


def chat_command(
    index: Index = DEFAULT_INDEX,
    k: Retrieved = 6,
    search: SearchBy = None,
    reranker: RerankerName = None,
    where: Where = None,
    method: Method = "auto",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    condense: Annotated[
        bool, typer.Option(help="Let the model rewrite follow-up questions for the search.")
    ] = True,
    drafts: Drafts = True,
    dtype: Dtype = None,
    device: Device = None,
    weights: Weights = "as stored",
    backend: BackendName = "transformers",
    remote: Remote = None,
) -> None:
    """Talk to the documents of an index; each turn's KV serves the next."""
    from cached_rag import GenerationConfig

    config = GenerationConfig(
        method=method, max_tokens=max_tokens, temperature=temperature, seed=seed, drafts=drafts
    )
    chosen = filters(where)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how |= {"search": search, "reranker": reranker}
    with opened(index, remote, backend=backend, **how) as rag:

        def begin() -> Chat:
            return rag.chat(k=k, where=chosen, config=config, condense=condense)

        chat, has_failed = begin(), False
        err.print(_HELP, style="dim")
        while question := _asked():
            if question == "/new":
                chat = begin()
            elif question == "/sources":
                _print_sources(chat)
            else:
                has_failed = not _answer(chat, question)
        if has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)


def _asked() -> str:
    """The next question; empty at the end of the input."""
    try:
        return input("> ").strip()
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
