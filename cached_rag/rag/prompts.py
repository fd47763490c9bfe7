"""From a question and its chunks to a prompt that fits the model's context. Knows no index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.backends.tokenizer import Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import ContextOverflowError
from cached_rag.rag import Hit

Turn = dict[str, str]
_MARK = "the first chunk"
# Questions before a follow-up that it is searched with; more of them would drown it.
_SEARCHED = 2


def searched(question: str, history: Sequence[Turn]) -> str:
    """What to search for: the last questions and this one, for "And how often?" finds nothing."""
    asked = [turn["content"] for turn in history if turn["role"] == "user"]
    return "\n".join([*asked[-_SEARCHED:], question])


@dataclass(frozen=True)
class Prompts:
    """How `CachedRAG` asks: chunks, then the question, under a system prompt."""

    engine: Engine
    system: str

    def messages(
        self, question: str, texts: Sequence[str], history: Sequence[Turn] = ()
    ) -> list[Turn]:
        """The chat: the chunks in the user's first turn, whatever was said since.

        So every prompt begins as those do that chunks were encoded behind, and a follow-up that
        finds the chunks of the question before it has the beginning of its prompt, too.
        """
        said: list[Turn] = [{"role": "system", "content": self.system}]
        blocks = list(texts)
        for turn in (*history, {"role": "user", "content": question}):
            if turn["role"] == "user":
                content = "\n\n".join([*blocks, f"Question: {turn['content'].strip()}"])
                said.append({"role": "user", "content": content})
                blocks = []
            else:
                said.append(turn)
        return said

    def head(self) -> Rendered:
        """What every prompt says before its first chunk."""
        return self.engine.head(self.messages("?", [_MARK]), _MARK)

    def fitting(
        self,
        question: str,
        hits: Sequence[Hit],
        max_tokens: int,
        history: Sequence[Turn] = (),
    ) -> tuple[list[Hit], Rendered]:
        """As many of the first chunks as the model's context holds, and the prompt with them.

        Raises:
            ContextOverflowError: not even one fits, or no prompt without any.
        """
        context = self.engine.model.context_length
        for count in range(len(hits), min(1, len(hits)) - 1, -1):
            messages = self.messages(question, [hit.text for hit in hits[:count]], history)
            rendered = self.engine.tokenization.render(messages)
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
