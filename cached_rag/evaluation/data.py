"""Question-answering sets, .jsonl files with an object a line; what of them is asked, and how."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cached_rag.backends.prompt_text import Message
from cached_rag.errors import EvaluationError
from cached_rag.kv.fingerprint import digest
from cached_rag.options import check_range, check_types, near

_BRIEF = "Answer the question with the help of the documents. Answer with a few words only."
_LONG = "Answer the question with the help of the documents."
_LONG_ANSWER_WORDS = 15
# Most characters of what is no text that an error quotes.
_SHOWN = 60


@dataclass(frozen=True)
class Questions:
    """Which questions of a set are asked, and what of them is measured.

    Attributes:
        limit: most questions of a file; None for all.
        answers: generate answers, for F1, EM and ROUGE-L; else only likelihoods are measured, in a
            third of the time.
        chunks: most chunks of a question; its answer's come first. None for all.

    Raises:
        ConfigError: a count below 1.
    """

    limit: int | None = None
    answers: bool = True
    chunks: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, math.inf, "limit", "chunks")


@dataclass(frozen=True)
class Example:
    """A question over several chunks.

    Attributes:
        id: unique in its set.
        answers: acceptable answers; may be empty.
        chunks: texts in the set's order, each below its title if it has one.
        document: all chunks of the document that some of these are from, in its order; empty if
            nothing is known of it.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    document: tuple[str, ...] = ()

    def digest(self, *, long: bool) -> str:
        """Names what is asked, whatever the file is called that it stands in.

        Args:
            long: it is asked for a long answer; see `messages`.
        """
        return digest(json.dumps(asdict(self) | ({"long": True} if long else {}), sort_keys=True))

    @property
    def reference(self) -> str | None:
        """The first answer, in the letter case of the chunks; None without answers.

        Some sets have their answers or texts in lower case. A model is unlikely to write an answer
        in another letter case than the chunks', so that answer's likelihood would say nothing.
        """
        if not self.answers:
            return None
        answer = self.answers[0].strip()
        if answer.lower() in ("yes", "no"):
            return answer.capitalize()
        pattern = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)
        forms = [form for chunk in self.chunks for form in pattern.findall(chunk)]
        return answer if answer in forms or not forms else forms[0]

    def fewer(self, count: int) -> Example:
        """The same with so many chunks, in their order: those with the answer, then the first."""
        places = range(len(self.chunks))
        order = sorted(places, key=lambda i: not self._is_answered_by(self.chunks[i]))
        return replace(self, chunks=tuple(self.chunks[i] for i in sorted(order[:count])))

    def _is_answered_by(self, chunk: str) -> bool:
        return self.reference is not None and self.reference.lower() in chunk.lower()


def load_examples(path: Path) -> list[Example]:
    """The examples of a .jsonl file.

    Raises:
        EvaluationError: there is no such file, it has no example, or a line (named by its number)
            is not an example.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # strings may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"cannot read {path}: {error}") from error
    found: list[Example] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_example(line, f"{path}, line {number}"))
    if not found:
        raise EvaluationError(f"{path} has no examples; it needs one JSON object a line")
    return found


def _example(line: str, where: str) -> Example:
    try:
        row = json.loads(line)
        meant = near("answers", [key for key in row if "_" not in key])
        if meant and "answers" not in row:
            raise ValueError(f"{meant[0]!r} is not known; write answers, a list of texts")
        asked = _text(row["id"], "id"), _text(row["question"], "question")
        chunks, document = _chunks(row["chunks"]), _chunks(row.get("document", []))
        example = Example(*asked, _answers(row.get("answers", [])), chunks, document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EvaluationError(
            f"{where}: not an example ({error}); it needs id, question, answers and chunks "
            "with a text and, if they have one, a title each"
        ) from error
    if not all((*example.chunks, *example.document)) or not example.chunks:
        raise EvaluationError(f"{where}: an example needs chunks, and none of them empty")
    return example


def _text(value: Any, name: str) -> str:
    """A text, or a number as text; half of a surrogate pair is no text."""
    if type(value) not in (str, int, float):
        raise ValueError(f"{name}: a text is wanted, not {json.dumps(value)[:_SHOWN]}")
    str(value).encode()
    return str(value)


def _answers(answers: Any) -> tuple[str, ...]:
    if not isinstance(answers, list):
        raise ValueError("answers is a list, of all texts that count as right")
    return tuple(_text(answer, "answers") for answer in answers)


def _chunks(chunks: Any) -> tuple[str, ...]:
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise ValueError('chunks is a list of objects: {"text": ..., "title": ...}')
    return tuple(map(_chunk, chunks))


def _chunk(chunk: Mapping[str, Any]) -> str:
    title, text = _text(chunk.get("title") or "", "title").strip(), _text(chunk["text"], "text")
    return f"{title}\n{text.strip()}" if title else text.strip()


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
