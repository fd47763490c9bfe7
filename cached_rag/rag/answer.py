"""An answer with the chunks it was given, whole or piece by piece. Knows no index and no engine."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

from cached_rag.backends.prompt_text import Message
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.kv.fingerprint import digest
from cached_rag.rag.prompts import Turn, checked
from cached_rag.rag.search import Hit

if TYPE_CHECKING:
    from cached_rag.engine.explanation import Explanation
    from cached_rag.engine.stream import Stream
    from cached_rag.engine.trace import Trace, TraceSource

_SHOWN = 60


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer, the chunks it was given (best first), and the engine's report.

    Attributes:
        question: what was asked; with it, an answer can stand in the history of a follow-up.
        searched: what chunks were searched for with.
        trace_source: what `trace` is made of.
    """

    text: str
    sources: tuple[Hit, ...]
    report: Report
    question: str = ""
    searched: str = ""
    trace_source: TraceSource | None = field(default=None, compare=False)

    @property
    def trace(self) -> Trace | None:
        """What became of each of the prompt's tokens; `explain` shows it."""
        return self.trace_source.trace if self.trace_source else None

    def explain(self, full: Answer | None = None) -> Explanation:
        """What of the prompt was reused, moved, repaired and computed, and where the time went.

        In a notebook it shows itself; `print` gives it as text, `.save("out.html")` as a page.

        Args:
            full: the answer to the same question with `method="full"`, to compare with.

        Raises:
            ConfigError: the answer was put together by hand, or its prompt was not prefilled.
        """
        from cached_rag.engine.explanation import Explanation

        names = {digest(hit.text.strip()): str(hit) for hit in self.sources}
        return Explanation.of(self, full, names=names, title=self.question, text=self.text)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, its chunks, and what of the prompt was reused."""
        hits = "".join(f"<li>{escape(str(hit))}</li>" for hit in self.sources)
        said = "<br>".join(map(escape, [self.report.to_line(), *self.report.notes]))
        text = f'<div style="white-space: pre-wrap">{escape(self.text)}</div>'
        return f"{text}<ol>{hits}</ol><small>{said}</small>"

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"<Answer {shown!r}, {len(self.sources)} sources>"


@dataclass(eq=False, repr=False)
class AnswerStream(Iterator[str], AsyncIterable[str]):
    """The pieces of an answer, for a loop or an asynchronous loop, but not for both.

    Attributes:
        stream: the engine's, of which these are the pieces; take them from one of the two.
    """

    stream: Stream
    question: str
    sources: tuple[Hit, ...]
    _search_ms: float
    _notes: list[str]
    _searched: str = ""
    _text: list[str] = field(default_factory=list)
    _ended: Callable[[Answer], object] | None = None

    def when_ended(self, ended: Callable[[Answer], object]) -> None:
        """Have `ended` called with the answer once it is whole, closed or dropped, but not failed.

        It is not called for an answer of which nothing was taken, unless there is nothing in it.
        """
        self._ended = ended

    @property
    def answer(self) -> Answer:
        """The answer as far as it was taken; complete once all pieces were."""
        found = self.stream.report
        report = replace(found, search_ms=self._search_ms, notes=[*self._notes, *found.notes])
        text, source = "".join(self._text), self.stream.trace_source
        return Answer(text, self.sources, report, self.question, self._searched, source)

    def __next__(self) -> str:
        try:
            piece = next(self.stream)
        except StopIteration:
            self._end(is_whole=True)
            raise
        except Exception:  # an interruption is none: what there is of the answer is kept
            self._ended = None
            raise
        self._text.append(piece)
        return piece

    def __aiter__(self) -> AsyncIterator[str]:
        return self.apieces()

    async def apieces(self) -> AsyncGenerator[str, None]:
        """Piece by piece, without blocking the event loop; see `Stream.apieces`."""
        async with aclosing(self.stream.apieces()) as pieces:
            try:
                async for piece in pieces:
                    self._text.append(piece)
                    yield piece
            except Exception:
                self._ended = None
                raise
        self._end(is_whole=True)

    async def atext(self) -> str:
        """All pieces, without blocking the event loop; a cancelled task stops the generation."""
        async with aclosing(self.apieces()) as pieces:
            return "".join([piece async for piece in pieces])

    def close(self) -> None:
        """Stop generating."""
        self.stream.close()
        self._end(is_whole=False)

    def __del__(self) -> None:
        if self._ended is not None:
            self.close()

    def _end(self, *, is_whole: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and (self._text or is_whole):
            ended(self.answer)


def conversation(history: Sequence[Answer | Message]) -> list[Turn]:
    """Earlier turns as messages of the user and the assistant; an answer stands for two."""
    if isinstance(history, Answer | Mapping | str):
        raise ConfigError("a history is a list of answers or messages, such as [answer]")
    said: list[Turn] = []
    for turn in history:
        if isinstance(turn, Answer):
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.text})
        else:
            said.append(checked(turn))
    return said
