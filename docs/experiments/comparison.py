"""Compares whole applications: the same questions to each, in one run, timed from outside.

An application is a function from an example to pieces of text. Knows no framework.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cached_rag.engine.report import Report
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import f1
from cached_rag.evaluation.summary import Interval, bootstrap
from cached_rag.evaluation.timing import take_turns
from cached_rag.library.encode import EncodeSummary

Application = Callable[[Example], Iterator[str]]


@dataclass(frozen=True)
class ComparisonRow:
    """An application's medians over all questions.

    Attributes:
        ttft_ms, total_ms: milliseconds from the question to the first and the last piece of text.
        ttft_speedup, total_speedup: the first application's time over this one's, median over
            questions.
        f1: mean over the questions; None if some question has no reference answer.
        f1_difference: this application's F1 less the first one's, paired by question, with a 95 %
            interval; None as `f1`.
    """

    name: str
    questions: int
    ttft_ms: float
    total_ms: float
    ttft_speedup: float
    total_speedup: float
    f1: float | None
    f1_difference: Interval | None


@dataclass(frozen=True)
class _Answer:
    text: str
    ttft_ms: float
    total_ms: float


def compare(
    applications: Mapping[str, Application],
    examples: Sequence[Example],
    *,
    pause: float = 0.0,
    on_answer: Callable[[str, Example, str], object] = lambda *_: None,
) -> list[ComparisonRow]:
    """Ask every application every question, in turn, in an order that rotates.

    The first question is asked an extra time before all others, to warm up. Everything runs in one
    thread that is not the main one, as in a server: once the main thread has computed with torch,
    other threads are slower.

    Args:
        applications: the first one is what the others are compared with.
        pause: seconds to wait before each question, for background work of the last answer to end.
        on_answer: called with application, example and text of each answer.

    Raises:
        EvaluationError: there is no application or no example.
    """
    if not applications or not examples:
        raise EvaluationError("a comparison needs applications and questions")
    questions = [examples[0], *examples]

    def asks(name: str) -> Callable[[], _Answer]:
        """A function that asks the next question at each call."""
        numbered = enumerate(questions)

        def ask() -> _Answer:
            number, example = next(numbered)
            time.sleep(pause)
            answer = _timed(applications[name], example)
            if number:  # number 0 is the warm-up
                on_answer(name, example, answer.text)
            return answer

        return ask

    with ThreadPoolExecutor(1, "comparison") as pool:
        variants = {name: asks(name) for name in applications}
        answers = pool.submit(take_turns, variants, len(examples)).result()
    base = next(iter(answers.values()))
    return [_row(name, found, base, examples) for name, found in answers.items()]


def summarise_comparison(
    rows: Sequence[ComparisonRow],
    reports: Sequence[Report],
    outside_ms: Sequence[float],
    encoded: EncodeSummary,
) -> dict[str, Any]:
    """What a framework's benchmark prints: the rows, and medians over the requests behind them.

    Args:
        reports: of all requests; those with full prefill are left out.
        outside_ms: milliseconds that each request spent outside the engine.
        encoded: the result of encoding the documents.

    Returns:
        A dictionary with "rows", "overhead_ms", "prompt_tokens", "charged_recompute", "encoded".

    Raises:
        EvaluationError: a request took KV that an earlier one had left, so it was no new prompt.
    """
    if any(report.kept_tokens for report in reports):
        raise EvaluationError(
            "a prompt was answered with KV that an earlier one had left; make the engine with "
            "StoreConfig(sequence_bytes=0)"
        )
    used = [report for report in reports if report.method != "full"]
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "overhead_ms": round(statistics.median(outside_ms), 2),
        "prompt_tokens": statistics.median(report.prompt_tokens for report in used),
        "charged_recompute": round(statistics.median(r.charged_recompute for r in used), 4),
        "encoded": {"modules": encoded.encoded, "tokens": encoded.tokens},
    }


def _timed(application: Application, example: Example) -> _Answer:
    started = time.perf_counter()
    first, pieces = 0.0, []
    for piece in application(example):
        if piece and not first:
            first = time.perf_counter() - started
        pieces.append(piece)
    total = time.perf_counter() - started
    return _Answer("".join(pieces), (first or total) * 1000, total * 1000)


def _row(
    name: str, found: list[_Answer], base: list[_Answer], examples: Sequence[Example]
) -> ComparisonRow:
    pairs = list(zip(found, base, strict=True))
    scores, others = _scores(found, examples), _scores(base, examples)
    differences = [a - b for a, b in zip(scores, others, strict=True)]
    return ComparisonRow(
        name,
        len(found),
        round(statistics.median(one.ttft_ms for one in found), 1),
        round(statistics.median(one.total_ms for one in found), 1),
        round(statistics.median(b.ttft_ms / one.ttft_ms for one, b in pairs), 2),
        round(statistics.median(b.total_ms / one.total_ms for one, b in pairs), 2),
        round(statistics.fmean(scores), 4) if scores else None,
        bootstrap(differences) if scores else None,
    )


def _scores(answers: list[_Answer], examples: Sequence[Example]) -> list[float]:
    """F1 of each answer; an empty list if some question has no reference answer."""
    if not all(example.answers for example in examples):
        return []
    return [f1(one.text, e.answers) for one, e in zip(answers, examples, strict=True)]
