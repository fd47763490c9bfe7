"""What a question gets: text, sources, report; what a follow-up knows. Knows no model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from cached_rag.backends.tokenizer import Message
from cached_rag.engine.report import Report
from cached_rag.engine.stream import Stream
from cached_rag.errors import ConfigError
from cached_rag.rag import Hit

# A chunk less similar than that has little to do with a question (sentence-transformers' models).
FAR = 0.25
_SHOWN = 60


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer, the chunks it was given (best first), and the engine's report.

    Attributes:
        question: what was asked; with it, an answer can stand in the history of a follow-up.
    """

    text: str
    sources: tuple[Hit, ...]
    report: Report
    question: str = ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"<Answer {shown!r}, {len(self.sources)} sources>"


def remarks(found: Sequence[Hit], min_score: float | None) -> list[str]:
    """What the user should know of the chunks that were found, best first."""
    best = found[0].score
    if min_score is not None and best < min_score:
        return [f"no chunk reaches min_score (the nearest has {best:.2f}), so none was used"]
    if best < FAR:
        return [
            f"the nearest chunk is hardly about this (score {best:.2f}); the answer may be made up"
        ]
    return []


def conversation(history: Sequence[Answer | Message]) -> list[dict[str, str]]:
    """Earlier turns as messages of the user and the assistant.

    Args:
        history: answers, each standing for its question and itself, or messages; in order.

    Raises:
        ConfigError: a message of another role, or without text.
    """
    said: list[dict[str, str]] = []
    for turn in history:
        if isinstance(turn, Answer):
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.text})
            continue
        role, content = turn.get("role"), turn.get("content")
        if role not in ("user", "assistant") or not isinstance(content, str):
            raise ConfigError(
                "a turn of the history is an Answer, or a message whose role is 'user' or "
                f"'assistant' and whose content is a string; got {turn!r}"
            )
        said.append({"role": role, "content": content})
    return said


class AnswerStream(Iterator[str], AsyncIterable[str]):
    """Pieces of an answer, for loops and for asynchronous loops; `answer` is complete at its end.

    A stream is taken in one of the two ways.
    """

    def __init__(
        self,
        stream: Stream,
        sources: tuple[Hit, ...],
        *,
        question: str = "",
        search_ms: float = 0.0,
        notes: Sequence[str] = (),
    ) -> None:
        self.sources, self.question = sources, question
        self._stream, self._search_ms, self._notes = stream, search_ms, list(notes)
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
        engines = self._stream.report
        notes = [*self._notes, *engines.notes]
        report = replace(engines, search_ms=self._search_ms, notes=notes)
        return Answer("".join(self._text), self.sources, report, self.question)

    def close(self) -> None:
        """Stop generating."""
        self._stream.close()
