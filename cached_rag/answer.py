"""What a question gets: text, sources, report. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
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


class AnswerStream(Iterator[str]):
    """Pieces of an answer; `answer` is complete at its end."""

    def __init__(self, stream: Stream, sources: tuple[Hit, ...], *, search_ms: float = 0.0) -> None:
        self.sources = sources
        self._stream, self._search_ms = stream, search_ms
        self._text: list[str] = []

    def __next__(self) -> str:
        piece = next(self._stream)
        self._text.append(piece)
        return piece

    @property
    def answer(self) -> Answer:
        """What there is so far."""
        report = replace(self._stream.report, search_ms=self._search_ms)
        return Answer("".join(self._text), self.sources, report)

    def close(self) -> None:
        """Stop generating."""
        self._stream.close()
