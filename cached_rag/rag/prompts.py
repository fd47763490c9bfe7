"""From a question and its chunks to a prompt that fits the model's context. Knows no index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.backends.tokenizer import Message, Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.rag.index import Hit

Turn = dict[str, str]
_MARK = "the first chunk"
# How many earlier questions a follow-up is searched with; more of them would drown it.
_SEARCHED = 2
# Below this similarity a chunk hardly concerns the question (sentence-transformers' models).
_FAR = 0.25
_ASKS, _ANSWERS = "Question:", "Answer:"


def checked(turn: Message) -> Turn:
    """A message of the history with its role and text alone.

    Raises:
        ConfigError: its role is neither "user" nor "assistant", or its content is no string.
    """
    role, content = turn.get("role"), turn.get("content")
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


def reaching(min_score: float | None, hits: list[Hit]) -> list[Hit]:
    """Those hits whose score is at least `min_score`; all of them if it is None."""
    return hits if min_score is None else [hit for hit in hits if hit.score >= min_score]


def remarks(found: Sequence[Hit], min_score: float | None) -> list[str]:
    """What to tell the user about the chunks that a search found, best first; at least one."""
    best = found[0].score
    if min_score is not None and best < min_score:
        return [f"no chunk reaches min_score (the nearest has {best:.2f}), so none was used"]
    if best < _FAR:
        return [
            f"the nearest chunk is hardly about this (score {best:.2f}); the answer may be made up"
        ]
    return []


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
        """
        said: list[Turn] = [{"role": "system", "content": self.system}]
        blocks = list(texts)
        for turn in (*history, {"role": "user", "content": question}):
            if turn["role"] == "user":
                content = "\n\n".join([*blocks, f"{_ASKS} {turn['content'].strip()}"])
                said.append({"role": "user", "content": content})
                blocks = []
            else:
                said.append(turn)
        return said

    def rendered(self, messages: Sequence[Turn]) -> Rendered:
        """The chat by the model's template, or for a model without one as a page of plain text.

        The page ends with "Answer:". Nothing on it becomes a control token, whatever it spells.
        """
        if self._has_template:
            return self.engine.tokenization.render(messages)
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
        whole = self.rendered(self.messages("?", [_MARK]))
        return whole.until(whole.text.index(_MARK))

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
        for count in range(len(hits), min(1, len(hits)) - 1, -1):
            messages = self.messages(question, [hit.text for hit in hits[:count]], history)
            rendered = self.rendered(messages)
            if self._fits(rendered, context - max_tokens):
                return list(hits[:count]), rendered
        raise ContextOverflowError(
            f"the question, what was said before it and one chunk exceed the model's context of "
            f"{context} tokens less {max_tokens} for the answer; ask a shorter question, give less "
            "history, or lower max_tokens"
        )

    def _fits(self, rendered: Rendered, room: int) -> bool:
        if len(rendered.text.encode()) < room:  # a token is a byte at least, and BOS is one more
            return True
        return self.engine.count_tokens(rendered) <= room
