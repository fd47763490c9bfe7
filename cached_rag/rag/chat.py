"""A conversation with an index, whose prompts only grow.

Each question's chunks stay in the turn that they were found for. So a turn's prompt begins with the
whole of the turn before, answer included, whose KV is kept and serves as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock
from cached_rag.rag.answer import Answer, AnswerStream, conversation
from cached_rag.rag.asking import Asking
from cached_rag.rag.hit import Hit
from cached_rag.rag.prompts import searched
from cached_rag.rag.retrieval import Wanted

_REWRITE = (
    "Rewrite this question so that it can be understood without our conversation. Write only the "
    "question.\n\nQuestion: {}"
)
_MOST_REWRITTEN = 64


@dataclass(frozen=True)
class _Turn:
    """A turn of the conversation: its answer, and the chunks that its question stands behind."""

    answer: AnswerStream
    texts: tuple[str, ...]


class Chat:
    """A conversation; `CachedRAG.chat` begins one.

    Where it outgrows the model's context, its older half is forgotten, and `report.notes` of the
    next answer says so.

    Example:
        chat = rag.chat()
        print(chat.ask("How is the valve reset?"))
        for piece in chat.stream("And how often?"):
            print(piece, end="")
    """

    def __init__(
        self,
        asking: Callable[[], Asking],
        wanted: Wanted,
        config: GenerationConfig,
        *,
        condense: bool,
    ) -> None:
        """See `CachedRAG.chat`."""
        self._asking, self._wanted, self._config = asking, wanted, config
        self._condense = condense
        self._turns: list[_Turn] = []

    @property
    def history(self) -> tuple[Answer, ...]:
        """The answers that are not forgotten, in order; each as far as it was taken."""
        return tuple(turn.answer.answer for turn in self._turns)

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
        """As `ask`, piece by piece. Whatever of it was taken belongs to the conversation."""
        asking = self._asking()
        config = self._config.replace(**options)
        clock = Clock()
        text = self._searched(asking, question, config)
        found = asking.find(text, self._wanted)
        search_ms = clock.total()
        forgotten = self._forget(asking, question, found.hits, config.max_tokens)
        new = self._new(found.hits)
        said, given = self._said()
        new, prompt = asking.prompts.fitting(question, new, config.max_tokens, said, given)
        here = {text for texts in (*given, [hit.text for hit in new]) for text in texts}
        hits = [hit for hit in found.hits if hit.text in here]
        if forgotten:
            note = f"the conversation's first {forgotten} turns no longer fit, and were forgotten"
            found = found.noting(note)
        stream = asking.begin(question, prompt, hits, found, text, config, clock, search_ms)
        self._turns.append(_Turn(stream, tuple(hit.text for hit in new)))
        return stream

    async def astream(self, question: str, **options: Any) -> AnswerStream:
        """As `stream`, for an asynchronous loop; the search runs in a thread of its own."""
        return await asyncio.to_thread(self.stream, question, **options)

    def _said(self) -> tuple[list[dict[str, str]], list[tuple[str, ...]]]:
        """The conversation, and the chunks of each of its questions."""
        return conversation(self.history), [turn.texts for turn in self._turns]

    def _new(self, hits: Sequence[Hit]) -> list[Hit]:
        """Those chunks that the conversation does not have yet."""
        given = {text for turn in self._turns for text in turn.texts}
        return [hit for hit in hits if hit.text not in given]

    def _forget(self, asking: Asking, question: str, hits: Sequence[Hit], max_tokens: int) -> int:
        """Forget the older half until the prompt fits; says how many turns went.

        Half of them: else every turn's prompt would have another beginning from then on.
        """
        before = len(self._turns)
        while self._turns:
            said, given = self._said()
            if asking.prompts.fits(question, self._new(hits), max_tokens, said, given):
                break
            del self._turns[: (len(self._turns) + 1) // 2]
        return before - len(self._turns)

    def _searched(self, asking: Asking, question: str, config: GenerationConfig) -> str:
        """What to search for: the question as it would be asked alone, and as it was asked.

        The model is asked to rewrite it behind the conversation, whose KV it has.
        """
        said, given = self._said()
        if not said or not self._condense:
            return searched(question, said)
        prompts = asking.prompts
        messages = prompts.messages(question, (), said, given)
        messages[-1] = {"role": "user", "content": _REWRITE.format(question.strip())}
        prompt = prompts.rendered(messages)
        if not prompts.has_room(prompt, _MOST_REWRITTEN):
            return searched(question, said)
        answer = asking.engine.generate(
            prompt,
            GenerationConfig(
                method=config.method, max_tokens=_MOST_REWRITTEN, stop=("\n", *prompts.stop)
            ),
        )
        return f"{answer.text.strip()}\n{question}"
