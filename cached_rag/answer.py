"""What a question gets: text, sources, report. Knows no model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from cached_rag.documents import Hit
from cached_rag.report import Report
from cached_rag.stream import Stream


@dataclass(frozen=True)
class Answer:
    """An answer, the chunks it was given (best first), and the engine's report."""

    text: str
    sources: tuple[Hit, ...]
    report: Report


class AnswerStream(Iterator[str], AsyncIterable[str]):
    """Pieces of an answer, for loops and for asynchronous loops; `answer` is complete at its end.

    A stream is taken in one of the two ways.
    """

    def __init__(self, stream: Stream, sources: tuple[Hit, ...], *, search_ms: float = 0.0) -> None:
        self.sources = sources
        self._stream, self._search_ms = stream, search_ms
        self._text: list[str] = []

    def __next__(self) -> str:
        piece = next(self._stream)
        self._text.append(piece)
        return piece

    def __aiter__(self) -> AsyncIterator[str]:
        return self.apieces()

    async def apieces(self) -> AsyncGenerator[str, None]:
        """Piece by piece, without blocking the event loop; see `Stream.apieces`."""
        async with aclosing(self._stream.apieces()) as pieces:
            async for piece in pieces:
                self._text.append(piece)
                yield piece

    async def atext(self) -> str:
        """All pieces, without blocking the event loop; a cancelled task stops the generation."""
        async with aclosing(self.apieces()) as pieces:
            return "".join([piece async for piece in pieces])

    @property
    def answer(self) -> Answer:
        """What there is so far."""
        report = replace(self._stream.report, search_ms=self._search_ms)
        return Answer("".join(self._text), self.sources, report)

    def close(self) -> None:
        """Stop generating."""
        self._stream.close()
