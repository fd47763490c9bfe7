"""From a question and its chunks to a prompt that fits the model's context. Knows no index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.documents import Hit
from cached_rag.engine import Engine
from cached_rag.errors import ContextOverflowError
from cached_rag.prompt import Rendered

_MARK = "the first chunk"


@dataclass(frozen=True)
class Prompts:
    """How `CachedRAG` asks: chunks, then the question, under a system prompt."""

    engine: Engine
    system: str

    def messages(self, question: str, texts: Sequence[str]) -> list[dict[str, str]]:
        """The chat."""
        context = "\n\n".join(texts)
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": f"{context}\n\nQuestion: {question.strip()}"},
        ]

    def head(self) -> Rendered:
        """What every prompt says before its first chunk."""
        return self.engine.head(self.messages("?", [_MARK]), _MARK)

    def fitting(
        self, question: str, hits: Sequence[Hit], max_tokens: int
    ) -> tuple[list[Hit], Rendered]:
        """As many of the first chunks as the model's context holds, and the prompt with them.

        Raises:
            ContextOverflowError: not even one fits.
        """
        context = self.engine.model.context_length
        for count in range(len(hits), 0, -1):
            messages = self.messages(question, [hit.text for hit in hits[:count]])
            rendered = self.engine.tokenization.render(messages)
            if self._fits(rendered, context - max_tokens):
                return list(hits[:count]), rendered
        raise ContextOverflowError(
            f"the question and one chunk exceed the model's context of {context} tokens less "
            f"{max_tokens} for the answer; ask a shorter question, or lower max_tokens"
        )

    def _fits(self, rendered: Rendered, room: int) -> bool:
        if len(rendered.text.encode()) < room:  # a token is a byte at least, and BOS is one more
            return True
        return self.engine.count_tokens(rendered) <= room
