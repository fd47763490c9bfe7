"""The prompts of the evaluation. Knows messages; knows no model and no method."""

from __future__ import annotations

from collections.abc import Sequence

from cached_rag.backends.prompt_text import Message
from cached_rag.evaluation.data import Example

_BRIEF = "Answer the question with the help of the documents. Answer with a few words only."
_LONG = "Answer the question with the help of the documents."
_LONG_ANSWER_WORDS = 15


def is_long(examples: Sequence[Example]) -> bool:
    """Whether a set's answers are sentences rather than a few words, by their median length."""
    lengths = sorted(len(e.answers[0].split()) for e in examples if e.answers)
    return bool(lengths) and lengths[len(lengths) // 2] > _LONG_ANSWER_WORDS


def messages(chunks: Sequence[str], question: str, *, long: bool) -> list[Message]:
    """A chat of a system prompt and one user message: the documents, then the question."""
    context = "\n\n".join(chunks)
    return [
        {"role": "system", "content": _LONG if long else _BRIEF},
        {"role": "user", "content": f"{context}\n\nQuestion: {question.strip()}"},
    ]
