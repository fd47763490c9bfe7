"""From a question and its chunks to a prompt that fits the model's context. Knows no index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.kv.fingerprint import digest
from cached_rag.rag.search import Hit

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine

Turn = dict[str, str]
# How many earlier questions a follow-up is searched with; more of them would drown it.
_SEARCHED = 2
_ASKS, _ANSWERS = "Question:", "Answer:"


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
    """What to search for: a question behind the last ones, for "And how often?" finds nothing."""
    asked = [turn["content"] for turn in history if turn["role"] == "user"]
    return "\n".join([*asked[-_SEARCHED:], question])


@dataclass(frozen=True)
class Prompts:
    """How `CachedRAG` asks: chunks, then the question, under a system prompt."""

    engine: Engine
    system: str

    def messages(
        self,
        question: str,
        texts: Sequence[str],
        history: Sequence[Turn] = (),
        given: Sequence[Sequence[str]] | None = None,
    ) -> list[Turn]:
        """The chat, with the chunks in the user's first turn, whatever was said since.

        So every prompt begins with the head that chunks were encoded behind; and a follow-up that
        finds the same chunks as the question before it begins with that question's whole prompt.
        An empty system prompt is no message.

        Args:
            given: chunks of each question of the history; then these stand there, and `texts` in
                the last turn.
        """
        asked = sum(turn["role"] == "user" for turn in history)
        blocks = iter([texts, *[()] * asked] if given is None else [*given, texts])
        said: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in (*history, {"role": "user", "content": question}):
            if turn["role"] == "user":
                content = "\n\n".join([*next(blocks), f"{_ASKS} {turn['content'].strip()}"])
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
        given: Sequence[Sequence[str]] | None = None,
    ) -> tuple[list[Hit], Rendered]:
        """As many of the first chunks as fit the model's context, and the prompt with them.

        Args:
            max_tokens: tokens to leave free for the answer.
            given: see `messages`.

        Raises:
            ContextOverflowError: not even one chunk fits, or the prompt alone does not.
        """
        context = self.engine.model.context_length
        for count in range(len(hits), min(1, len(hits)) - 1, -1):
            texts = [hit.text for hit in hits[:count]]
            rendered = self.rendered(self.messages(question, texts, history, given))
            if self.has_room(rendered, max_tokens):
                return list(hits[:count]), rendered
        raise ContextOverflowError(
            f"the question, what was said before it and one chunk exceed the model's context of "
            f"{context} tokens less {max_tokens} for the answer; ask a shorter question, give less "
            "history, or lower max_tokens"
        )

    def fits(
        self,
        question: str,
        hits: Sequence[Hit],
        max_tokens: int,
        history: Sequence[Turn],
        given: Sequence[Sequence[str]],
    ) -> bool:
        """Whether a prompt with all these chunks fits; see `fitting`."""
        messages = self.messages(question, [hit.text for hit in hits], history, given)
        return self.has_room(self.rendered(messages), max_tokens)

    def has_room(self, rendered: Rendered, max_tokens: int) -> bool:
        """Whether the model's context has room for an answer of so many tokens."""
        room = self.engine.model.context_length - max_tokens
        if len(rendered.text.encode()) < room:  # a token is a byte at least, and BOS is one more
            return True
        return self.engine.count_tokens(rendered) <= room
