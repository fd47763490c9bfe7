"""A conversation with an index, whose prompts only grow.

Each question's chunks stay in the turn that they were found for. So a turn's prompt begins with the
whole of the turn before, answer included, whose KV is kept and serves as it is.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cached_rag.backends.prompt_text import Message
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import ConfigError
from cached_rag.rag.answer import Answer, AnswerStream, conversation
from cached_rag.rag.asking import Asking, check_question
from cached_rag.rag.folder import Retrieval
from cached_rag.rag.prompts import Turn, searched
from cached_rag.rag.search import Hit

_REWRITE = (
    "Rewrite this question so that it can be understood without our conversation. Write only the "
    "question.\n\nQuestion: {}"
)
_MOST_REWRITTEN = 64


@dataclass(frozen=True)
class _Exchange:
    """A question with the chunks that it stands behind, and its answer as far as it was taken."""

    answer: Answer
    texts: tuple[str, ...]


class Chat:
    """A conversation; `CachedRAG.chat` begins one. Not for several threads at the same time.

    Where it outgrows the model's context, its older half is forgotten, and `report.notes` of the
    next answer says so. Chunks of documents that are deleted leave it, too. A question that fails
    leaves it as it was.

    Example:
        chat = rag.chat()
        print(chat.ask("How is the valve reset?"))
        for piece in chat.stream("And how often?"):
            print(piece, end="")
    """

    def __init__(
        self,
        asking: Callable[[], Asking],
        wanted: Retrieval,
        config: GenerationConfig,
        *,
        condense: bool,
        said: Sequence[_Exchange] = (),
    ) -> None:
        """See `CachedRAG.chat`; `said` is what was said before."""
        self._asking, self._wanted, self._config = asking, wanted, config
        self._condense = condense
        self._said = list(said)
        self._open: Callable[[], AnswerStream | None] = lambda: None

    @property
    def history(self) -> tuple[Answer, ...]:
        """The answers that are not forgotten, in order; each as far as it was taken.

        An answer belongs to it once it ends, is closed, or the next question is asked.
        """
        return tuple(exchange.answer for exchange in self._said)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What is not forgotten as messages, which JSON can keep and `CachedRAG.chat` goes on with.

        Those of the user have the texts of their "chunks", so that prompts begin as they did.
        """
        found: list[dict[str, Any]] = []
        for one in self._said:
            asked = {"role": "user", "content": one.answer.question, "chunks": list(one.texts)}
            found += [asked, {"role": "assistant", "content": one.answer.text}]
        return found

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer the next question.

        Args:
            options: settings of `GenerationConfig`, in place of the conversation's.

        Raises:
            ConfigError: an empty index or question, or a bad setting.
            ContextOverflowError: the question alone does not fit the model's context.
        """
        stream = self.stream(question, **options)
        for _ in stream:
            pass
        return stream.answer

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """As `ask`, piece by piece. If the answer before it is not whole yet, it ends here."""
        check_question(question)
        config = self._config.replace(**options)
        asking = self._asking()
        if (last := self._open()) is not None:
            last.close()
        clock = Clock()
        said = _without(self._said, asking.index.orphans(_texts(self._said)))
        text = self._searched(asking, question, said, config)
        found = asking.look_up(text, self._wanted, clock)
        kept = _fitting(asking, question, found.hits, said, config.max_tokens)
        new = _new(found.hits, kept)
        turns, given = _turns(kept)
        new, prompt = asking.prompts.fitting(question, new, config.max_tokens, turns, given)
        here = {*_texts(kept), *(hit.text for hit in new)}
        hits = [hit for hit in found.hits if hit.text in here]
        if gone := len(said) - len(kept):
            note = f"the conversation's first {gone} turns no longer fit, and were forgotten"
            found = replace(found, notes=[*found.notes, note])
        if here or self._wanted.answer_anyway:
            stream = asking.begin(question, prompt, hits, found, config)
        else:
            stream = asking.decline(question, found)
        texts = tuple(hit.text for hit in new)

        def ended(answer: Answer) -> None:
            self._said = [*kept, _Exchange(answer, texts)]

        stream.when_ended(ended)
        self._open = weakref.ref(stream)
        return stream

    async def astream(self, question: str, **options: Any) -> AnswerStream:
        """As `stream`, for an asynchronous loop; the search runs in a thread of its own."""
        return await asyncio.to_thread(self.stream, question, **options)

    def _searched(
        self, asking: Asking, question: str, said: list[_Exchange], config: GenerationConfig
    ) -> str:
        """What to search for: the question as it would be asked alone, and the last ones.

        The model is asked to rewrite it behind the conversation, whose KV it has.
        """
        turns, given = _turns(said)
        plain = searched(question, turns)
        if not said or not self._condense:
            return plain
        prompts = asking.prompts
        messages = prompts.messages(question, (), turns, given)
        messages[-1] = {"role": "user", "content": _REWRITE.format(question.strip())}
        prompt = prompts.rendered(messages)
        if not prompts.has_room(prompt, _MOST_REWRITTEN):
            return plain
        answer = asking.engine.generate(
            prompt,
            GenerationConfig(
                method=config.method, max_tokens=_MOST_REWRITTEN, stop=("\n", *prompts.stop)
            ),
        )
        rewritten = answer.text.strip()
        # What begins with a tag is a thought, not a question.
        return plain if not rewritten or rewritten.startswith("<") else f"{rewritten}\n{plain}"


def resumed(history: Sequence[Answer | Message]) -> list[_Exchange]:
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
    said: list[_Exchange] = []
    for asked, answered, texts in zip(turns[::2], turns[1::2], given[::2], strict=True):
        answer = Answer(answered["content"], (), Report("auto"), asked["content"])
        known = _texts(said)
        said.append(_Exchange(answer, tuple(text for text in texts if text not in known)))
    return said


def _given(turn: Answer | Message) -> list[tuple[str, ...]]:
    """The chunks of each message that a turn of a history stands for."""
    if isinstance(turn, Answer):
        return [tuple(hit.text for hit in turn.sources), ()]
    texts = turn.get("chunks", ())
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("the chunks of a message are a list of texts, as Chat.messages has them")
    return [tuple(texts)]


def _turns(said: Sequence[_Exchange]) -> tuple[list[Turn], list[tuple[str, ...]]]:
    """A conversation as messages, and the chunks of each of its questions."""
    turns = conversation([exchange.answer for exchange in said])
    return turns, [exchange.texts for exchange in said]


def _texts(said: Sequence[_Exchange]) -> list[str]:
    return [text for exchange in said for text in exchange.texts]


def _without(said: Sequence[_Exchange], texts: Sequence[str]) -> list[_Exchange]:
    """A conversation without these chunks."""
    return [
        _Exchange(one.answer, tuple(text for text in one.texts if text not in texts))
        for one in said
    ]


def _new(hits: Sequence[Hit], said: Sequence[_Exchange]) -> list[Hit]:
    """Those chunks that the conversation does not have yet."""
    given = set(_texts(said))
    return [hit for hit in hits if hit.text not in given]


def _fitting(
    asking: Asking,
    question: str,
    hits: Sequence[Hit],
    said: list[_Exchange],
    max_tokens: int,
) -> list[_Exchange]:
    """What of the conversation leaves room for the question, and for as many chunks as fit alone.

    The older half goes as a whole: else every further prompt would have another beginning.
    """
    wanted, _ = asking.prompts.fitting(question, hits, max_tokens)
    while said:
        turns, given = _turns(said)
        if asking.prompts.fits(question, _new(wanted, said), max_tokens, turns, given):
            break
        said = said[(len(said) + 1) // 2 :]
    return said
