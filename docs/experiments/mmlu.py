"""MMLU by examples that a subject's questions share, asked at once (RelayAttention, table 3).

As in the paper, the examples are the prompts' common beginning, an answer has 32 tokens, and the
first of the letters A to D in it is taken. The ways to serve are those of `serving.py`. The folder
is that of MMLU's archive: `dev/*_dev.csv` has the examples, `test/*_test.csv` the questions
(https://github.com/hendrycks/test).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cached_rag.backends.base import Backend
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.timing import take_turns
from docs.experiments.serving import Workload, check_methods, every_token, serve

_LETTERS = "ABCD"
_NEW_TOKENS = 32


@dataclass(frozen=True)
class MmluRow:
    """One way of serving all questions of some subjects, a subject at a time.

    Attributes:
        shots: examples before each question.
        accuracy: the share of right answers.
        seconds: for all answers, and for the KV of what they share.
        speedup: over the last method.
    """

    method: str
    shots: int
    questions: int
    accuracy: float
    seconds: float
    speedup: float


@dataclass(frozen=True)
class Subject:
    """Examples and questions of one subject, as text, and the questions' letters."""

    examples: str
    questions: tuple[str, ...]
    letters: tuple[str, ...]


def load_subject(folder: Path, name: str, shots: int, limit: int) -> Subject:
    """A subject's first examples and questions.

    Raises:
        EvaluationError: a file is missing, or is not one of MMLU's.
    """
    shown = _rows(folder / "dev" / f"{name}_dev.csv")[:shots]
    asked = _rows(folder / "test" / f"{name}_test.csv")[:limit]
    answered = "\n\n".join(f"{_text(row)} {row[5]}" for row in shown)
    opening = f"These are multiple choice questions (with answers) about {name.replace('_', ' ')}."
    letters = tuple(row[5] for row in asked)
    return Subject(f"{opening}\n\n{answered}\n", tuple(map(_text, asked)), letters)


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"cannot read {path}: {error}; give the folder of MMLU") from error
    if not rows or any(len(row) != 6 or row[5] not in tuple(_LETTERS) for row in rows):
        raise EvaluationError(f"{path} needs a question, four answers and a letter a line")
    return rows


def _text(row: Sequence[str]) -> str:
    choices = (f"{letter}. {choice}" for letter, choice in zip(_LETTERS, row[1:5], strict=True))
    return "\n".join((row[0].strip(), *choices, "Answer:"))


def bench_mmlu(
    model: Backend,
    folder: Path,
    subjects: Sequence[str],
    *,
    shots: int = 5,
    limit: int = 16,
    methods: Sequence[str] = ("relay", "copied", "recomputed"),
) -> list[MmluRow]:
    """Ask all questions of a subject at once, by every method in turn.

    Raises:
        ConfigError: an unknown method.
        EvaluationError: as `load_subject`.
    """
    check_methods(methods)
    seconds, right = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
    loaded = [load_subject(folder, name, shots, limit) for name in subjects]
    for subject in loaded:
        with closing(Workload(model, subject.examples, subject.questions)) as work:
            ways = {
                name: partial(serve, work.engines[name], work.prompts, every_token(_NEW_TOKENS))
                for name in methods
            }
            for name, (served,) in take_turns(ways, 1).items():
                seconds[name] += served.seconds + work.encoding_s[name]
                found = (re.search(f"[{_LETTERS}]", answer.text) for answer in served.answers)
                right[name] += sum(
                    letter is not None and letter[0] == wanted
                    for letter, wanted in zip(found, subject.letters, strict=True)
                )
    asked = sum(len(subject.letters) for subject in loaded)
    return [
        MmluRow(name, shots, asked, right[name] / asked, seconds[name], seconds[methods[-1]] / took)
        for name, took in seconds.items()
    ]
