"""Applications side by side: what is timed, in which order, and what the figures mean."""

from __future__ import annotations

import threading

import pytest

from cached_rag.errors import EvaluationError
from cached_rag.evaluation.data import Example
from docs.experiments import comparison
from docs.experiments.comparison import compare

EXAMPLES = [Example(str(i), f"q{i}", ("green",), ("a chunk",)) for i in range(4)]


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(comparison, "time", clock)
    return clock


def speaker(text, delay, clock, log):
    def ask(example):
        log.append((text, example.id, threading.current_thread() is threading.main_thread()))
        yield ""
        clock.sleep(delay)
        yield text
        clock.sleep(delay)
        yield " indeed"

    return ask


def test_every_application_gets_every_question_in_turn(clock):
    log, told = [], []
    applications = {
        "slow": speaker("green", 0.03, clock, log),
        "fast": speaker("blue", 0.01, clock, log),
    }
    base, other = compare(
        applications, EXAMPLES, pause=5, on_answer=lambda *answer: told.append(answer)
    )
    # the first question, asked to warm up, does not count
    assert "".join(number for _, number, _ in log) == "0000112233"
    assert [text for text, _, _ in log][:6] == ["green", "blue", "blue", "green", "green", "blue"]
    assert not any(is_main for _, _, is_main in log)
    assert len(told) == 8
    assert (base.name, base.questions, base.ttft_ms, base.total_ms) == ("slow", 4, 30, 60)
    assert (other.name, other.ttft_ms) == ("fast", 10)
    assert (other.ttft_speedup, other.total_speedup) == (3, 3)
    assert (base.ttft_speedup, base.f1_difference.mean) == (1, 0)
    assert base.f1 == pytest.approx(2 / 3, abs=1e-3)  # "green indeed"
    assert other.f1 == 0
    assert other.f1_difference.mean == pytest.approx(-2 / 3, abs=1e-3)


def test_a_failure_is_raised_where_the_comparison_was_asked_for():
    def fail(_):
        raise RuntimeError("no answer")
        yield

    with pytest.raises(RuntimeError, match="no answer"):
        compare({"a": fail}, EXAMPLES)


def test_questions_without_answers_are_timed_only(clock):
    (row,) = compare({"a": speaker("x", 1, clock, [])}, [Example("1", "q", (), ("c",))])
    assert (row.ttft_ms, row.f1, row.f1_difference) == (1000, None, None)


@pytest.mark.parametrize(("applications", "examples"), [({}, EXAMPLES), ({"a": iter}, [])])
def test_nothing_to_compare_is_refused(applications, examples):
    with pytest.raises(EvaluationError, match="needs applications and questions"):
        compare(applications, examples)
