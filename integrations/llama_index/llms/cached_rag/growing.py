"""Answers that grow: what LlamaIndex is given after every piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import TypeVar

from llama_index.core.base.llms.types import ChatResponse, TextBlock
from llama_index.llms.cached_rag.messages import chat_response
from llama_index.llms.cached_rag.settings import EngineSettings
from llama_index.llms.cached_rag.tools import blocks

from cached_rag import Tools
from cached_rag.spi import Stream

_T = TypeVar("_T")


def growing_chat(tools: Tools) -> Callable[..., ChatResponse]:
    """`chat_response` for one answer's pieces; its calls keep their ids."""
    ids: list[str] = []
    said = ""

    def response(llm: EngineSettings, text: str, stream: Stream, delta: str) -> ChatResponse:
        nonlocal said
        found = blocks(tools, text, ids, is_over=not delta)
        before, said = said, next((b.text for b in found if isinstance(b, TextBlock)), "")
        return chat_response(llm, found, stream, said[len(before) :], is_over=not delta)

    return response


def pieces(
    llm: EngineSettings, stream: Stream, response: Callable[..., _T]
) -> Generator[_T, None, None]:
    """A response for every piece, and one with the finished report."""
    text = ""
    for piece in stream:
        text += piece
        yield response(llm, text, stream, piece)
    yield response(llm, text, stream, "")


async def apieces(
    llm: EngineSettings, stream: Stream, response: Callable[..., _T]
) -> AsyncGenerator[_T, None]:
    """As `pieces`, off the event loop."""
    text = ""
    async for piece in stream.apieces():
        text += piece
        yield response(llm, text, stream, piece)
    yield response(llm, text, stream, "")
