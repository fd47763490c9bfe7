"""What a model is asked and answers: prompts that fit its context, answers, conversations.

Knows no index and runs no engine.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.config import check_room
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.kv.fingerprint import digest
from cached_rag.rag.search import Hit

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from cached_rag.engine.explanation import Explanation
    from cached_rag.engine.stream import Stream
    from cached_rag.engine.tools import GrowingAnswer
    from cached_rag.engine.trace import Trace, TraceSource

# A message with its role and content; of a conversation's questions with their chunks, too.
Turn = dict[str, Any]
# How many earlier questions a follow-up is searched with; more of them would drown it.
_SEARCHED = 2
_ASKS, _ANSWERS = "Question:", "Answer:"
_CUT_OFF = (
    "max_tokens ended the answer within its thought; raise it, or open the index with "
    'chat_template_kwargs={"enable_thinking": False}'
)
_SHOWN = 60


def checked(turn: Message) -> Turn:
    """A message of the history with its role and text alone.

    Raises:
        ConfigError: its role is neither "user" nor "assistant", or its content is no string.
    """
    known = turn if isinstance(turn, Mapping) else {}
    role, content = known.get("role"), known.get("content")
    if role not in ("user", "assistant") or not isinstance(content, str):
        raise ConfigError(
            "a turn of the history is an Answer, or a message whose role is 'user' or "
            f"'assistant' and whose content is a string; got {turn!r}"
        )
    return {"role": role, "content": content}


def searched(question: str, history: Sequence[Turn]) -> str:
    """What to search for: a question before the last ones, for "And how often?" finds nothing.

    It stands first, and the newest next: of a long text, models read only the beginning.
    """
    asked = [turn["content"] for turn in reversed(history) if turn["role"] == "user"]
    return "\n".join([question, *asked[:_SEARCHED]])


@dataclass(frozen=True)
class Prompts:
    """How `CachedRAG` asks: chunks, then the question, under a system prompt."""

    engine: Engine
    system: str

    def messages(
        self, question: str, texts: Sequence[str], history: Sequence[Turn] = ()
    ) -> list[Turn]:
        """The chat, with the chunks in the user's first turn, whatever was said since.

        So every prompt begins with the head that chunks were encoded behind; and a follow-up that
        finds the same chunks as the question before it begins with that question's whole prompt.
        An empty system prompt is no message. Where questions of the history have chunks of their
        own, these stand there, and `texts` in the last turn.
        """
        turns = [*history, {"role": "user", "content": question}]
        is_dialogue = any("chunks" in turn for turn in history)
        first = next(turn for turn in turns if turn["role"] == "user")
        holder = turns[-1] if is_dialogue else first
        said: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            if turn["role"] == "user":
                chunks = texts if turn is holder else turn.get("chunks", ())
                content = "\n\n".join([*chunks, f"{_ASKS} {turn['content'].strip()}"])
                said.append({"role": "user", "content": content})
            else:
                said.append(turn)
        return said

    def rendered(self, messages: Sequence[Turn]) -> Rendered:
        """The chat by the model's template, or for a model without one as a page of plain text.

        The page ends with "Answer:". Nothing on it becomes a control token, whatever it spells.
        """
        if self._has_template:
            return self.engine.tokenization.template.render(messages)
        said = [
            f"{_ANSWERS} {turn['content']}" if turn["role"] == "assistant" else turn["content"]
            for turn in messages
        ]
        text = "\n\n".join([*said, _ANSWERS])
        return Rendered(text, ((0, len(text)),))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: on a page of plain text, the next question."""
        return () if self._has_template else (f"\n{_ASKS}",)

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.engine.tokenization.tokenizer, "chat_template", None))

    def head(self) -> Rendered:
        """The head of every prompt: all that stands before its first chunk."""
        mark = digest(self.system)  # which the system prompt cannot have in it
        whole = self.rendered(self.messages("?", [mark]))
        return whole.until(whole.text.index(mark))

    def fitting(
        self,
        question: str,
        hits: Sequence[Hit],
        max_tokens: int,
        history: Sequence[Turn] = (),
    ) -> tuple[list[Hit], Rendered]:
        """As many of the first chunks as fit the model's context, and the prompt with them.

        Args:
            max_tokens: tokens to leave free for the answer.

        Raises:
            ContextOverflowError: not even one chunk fits, or the prompt alone does not.
        """
        context = self.engine.model.context_length
        check_room(max_tokens, context)
        for count in range(len(hits), min(1, len(hits)) - 1, -1):
            texts = [hit.text for hit in hits[:count]]
            rendered = self.rendered(self.messages(question, texts, history))
            if self.has_room(rendered, max_tokens):
                return list(hits[:count]), rendered
        raise ContextOverflowError(
            f"the question, what was said before it and one chunk exceed the model's context of "
            f"{context} tokens less {max_tokens} for the answer; ask a shorter question, give less "
            "history, or lower max_tokens"
        )

    def has_room(self, rendered: Rendered, max_tokens: int) -> bool:
        """Whether the model's context has room for an answer of so many tokens."""
        room = self.engine.model.context_length - max_tokens
        if len(rendered.text.encode()) < room:  # a token is a byte at least, and BOS is one more
            return True
        return self.engine.count_tokens(rendered) <= room


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer, the chunks it was given (best first), and the engine's report.

    Attributes:
        thought: what a thinking model wrote before it; no later turn is shown it.
        question: what was asked; with it, an answer can stand in the history of a follow-up.
        searched: what chunks were searched for with.
        trace_source: what `trace` is made of.
        chunks: the texts of its chunks, if it was made of messages, which do not have `sources`.
    """

    text: str
    sources: tuple[Hit, ...]
    report: Report
    question: str = ""
    searched: str = ""
    thought: str = ""
    trace_source: TraceSource | None = field(default=None, compare=False)
    chunks: tuple[str, ...] = ()

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
            ConfigError: the answer was put together by hand, or its prompt was not prefilled, or
                the other answers another question.
        """
        if full is not None and full.question != self.question:
            raise ConfigError(
                f"an answer to {full.question!r} cannot be compared with one to {self.question!r}; "
                'ask the same question with method="full"'
            )
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


@dataclass(frozen=True)
class Lookup:
    """What was found for a question.

    Attributes:
        hits: best first.
        notes: what to tell the user about it.
        text: what was searched for.
        ms: how long that took, in milliseconds.
        clock: started when the question was asked.
    """

    hits: list[Hit]
    notes: list[str]
    text: str
    ms: float
    clock: Clock


@dataclass(eq=False, repr=False)
class AnswerStream(Iterator[str], AsyncIterable[str]):
    """The pieces of an answer, for a loop or an asynchronous loop, but not for both.

    A thought is no piece of it; `answer.thought` has it.

    Attributes:
        stream: the engine's, of which these are the pieces; take them from one of the two.
        sources: the chunks that are in its prompt.
        lookup: what was found, of which not all need to be in it.
    """

    stream: Stream
    question: str
    sources: tuple[Hit, ...]
    lookup: Lookup
    _growing: GrowingAnswer
    _text: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)
    _ended: Callable[[Answer], object] | None = None

    def when_ended(self, ended: Callable[[Answer], object]) -> None:
        """Have `ended` called with the answer once it is whole, closed or dropped, but not failed.

        It is not called for an answer of which nothing was taken, unless there is nothing in it.
        """
        self._ended = ended

    @property
    def answer(self) -> Answer:
        """The answer as far as it was taken; complete once all pieces were."""
        report, lookup = self.stream.report, self.lookup
        report = replace(report, search_ms=lookup.ms, notes=[*lookup.notes, *report.notes])
        text, thought = "".join(self._text), "".join(self._thought)
        if thought and not text and self.stream.finish_reason == "length":
            report.notes.append(_CUT_OFF)
        return Answer(
            *(text, self.sources, report, self.question, lookup.text, thought),
            trace_source=self.stream.trace_source,
        )

    def _grown(self, piece: str, *, is_over: bool = False) -> str:
        """What a piece of the stream adds to the text."""
        said, _ = self._growing.push(piece, is_over=is_over)
        self._thought.append(self._growing.new_thought)
        self._text.append(said)
        return said

    def __next__(self) -> str:
        try:
            while not (said := self._grown(next(self.stream))):
                pass
            return said
        except StopIteration:
            if rest := self._grown("", is_over=True):
                return rest
            self._end(is_whole=True)
            raise
        except Exception:  # an interruption is none: what there is of the answer is kept
            self._ended = None
            raise

    def __aiter__(self) -> AsyncGenerator[str, None]:
        return self.apieces()

    async def apieces(self) -> AsyncGenerator[str, None]:
        """Piece by piece, without blocking the event loop; see `Stream.apieces`."""
        async with aclosing(self.stream.apieces()) as pieces:
            try:
                async for piece in pieces:
                    if said := self._grown(piece):
                        yield said
                if rest := self._grown("", is_over=True):
                    yield rest
            except Exception:
                self._ended = None
                raise
        self._end(is_whole=True)

    async def atext(self) -> str:
        """All pieces, without blocking the event loop; a cancelled task stops the generation."""
        async with aclosing(self.apieces()) as pieces:
            return "".join([piece async for piece in pieces])

    def result(self) -> Answer:
        """The whole answer, whatever of it was taken already. Waits for its end."""
        for _ in self:
            pass
        return self.answer

    def close(self) -> None:
        """Stop generating."""
        self.stream.close()
        self._end(is_whole=False)

    def __del__(self) -> None:
        if self._ended is not None:
            self.stream.cancel()  # without waiting: the collector may run within a turn
            self._end(is_whole=False)

    def _end(self, *, is_whole: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and (self._text or is_whole):
            ended(self.answer)


def conversation(history: Sequence[Answer | Message]) -> list[Turn]:
    """Earlier turns as messages of the user and the assistant; an answer stands for two."""
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise ConfigError("a history is a list of answers or messages, such as [answer]")
    said: list[Turn] = []
    for turn in history:
        if isinstance(turn, Answer):
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.text})
        else:
            said.append(checked(turn))
    return said


@dataclass(frozen=True)
class Dialogue:
    """A conversation's answers in order, with the chunks that each question stands behind."""

    exchanges: tuple[tuple[Answer, tuple[str, ...]], ...] = ()

    @property
    def turns(self) -> list[Turn]:
        """It as messages; those of the user have the texts of their "chunks"."""
        turns: list[Turn] = []
        for answer, texts in self.exchanges:
            asked = {"role": "user", "content": answer.question, "chunks": list(texts)}
            turns += [asked, {"role": "assistant", "content": answer.text}]
        return turns

    @property
    def texts(self) -> list[str]:
        """The chunks that it has."""
        return [text for _, texts in self.exchanges for text in texts]

    def and_then(self, answer: Answer, texts: Iterable[str]) -> Dialogue:
        """A longer one, whose last exchange has those of the chunks that are new."""
        known = set(self.texts)
        new = tuple(text for text in texts if text not in known)
        return Dialogue((*self.exchanges, (answer, new)))

    def without(self, texts: Sequence[str]) -> Dialogue:
        """It without these chunks."""
        kept = Dialogue()
        for answer, had in self.exchanges:
            kept = kept.and_then(answer, (text for text in had if text not in texts))
        return kept


def resumed(history: Sequence[Answer | Message]) -> Dialogue:
    """A conversation of messages or answers, to go on with.

    Raises:
        ConfigError: not each question is followed by its answer, or a message is none.
    """
    turns = conversation(history)
    given = [texts for turn in history for texts in _given(turn)]
    if [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise ConfigError(
            "a chat's history is questions of the user, each followed by the assistant's answer, "
            "such as Chat.messages gives; leave out what has no answer"
        )
    said = Dialogue()
    for asked, answered, texts in zip(turns[::2], turns[1::2], given[::2], strict=True):
        answer = Answer(answered["content"], (), Report("auto"), asked["content"], chunks=texts)
        said = said.and_then(answer, texts)
    return said


def _given(turn: Answer | Message) -> list[tuple[str, ...]]:
    """The chunks of each message that a turn of a history stands for."""
    if isinstance(turn, Answer):
        return [tuple(hit.text for hit in turn.sources) or turn.chunks, ()]
    texts = turn.get("chunks", ())
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("the chunks of a message are a list of texts, as Chat.messages has them")
    return [tuple(texts)]
