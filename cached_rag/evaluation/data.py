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
from cached_rag.options import check_range, check_types

_BRIEF = "Answer the question with the help of the documents. Answer with a few words only."
_LONG = "Answer the question with the help of the documents."
_LONG_ANSWER_WORDS = 15


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

    @property
    def digest(self) -> str:
        """Names what is asked, whatever the file is called that it stands in."""
        return digest(json.dumps(asdict(self), sort_keys=True))

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


def load_examples(path: Path, limit: int | None = None) -> list[Example]:
    """The first `limit` examples of a .jsonl file.

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
        if limit is not None and len(found) == limit:
            break
        if line.strip():
            found.append(_example(line, f"{path}, line {number}"))
    if not found:
        raise EvaluationError(f"{path} has no examples; it needs one JSON object a line")
    return found


def _example(line: str, where: str) -> Example:
    try:
        row = json.loads(line)
        chunks = tuple(_chunk(chunk) for chunk in row["chunks"])
        if isinstance(row.get("answers"), str) or "answer" in row:
            raise ValueError("answers is a list, of all that count as right")
        answers = tuple(str(answer) for answer in row.get("answers", ()))
        document = tuple(_chunk(chunk) for chunk in row.get("document", ()))
        example = Example(str(row["id"]), str(row["question"]), answers, chunks, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{where}: not an example ({error}); it needs id, question, answers and chunks "
            "with a title and a text each"
        ) from error
    if not all((*example.chunks, *example.document)) or not example.chunks:
        raise EvaluationError(f"{where}: an example needs chunks, and none of them empty")
    return example


def _chunk(chunk: Mapping[str, Any]) -> str:
    title, text = str(chunk.get("title") or "").strip(), str(chunk["text"]).strip()
    return f"{title}\n{text}" if title else text


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
