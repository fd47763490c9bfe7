"""Signals that reuse costs a question something, and what it cost those where they are strong."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import CHUNKS
from typer.testing import CliRunner

from cached_rag import ConfigError
from cached_rag.evaluation.data import load_examples
from docs.experiments.__main__ import app
from docs.experiments.signals import OTHERS, STRONG, _rows, _signals, bench_signals

SURE, OTHER, UNSURE = (
    torch.tensor(p).log() for p in ([1 - 1e-6, 1e-6], [1e-6, 1 - 1e-6], [0.5] * 2)
)


def test_experts_that_say_the_same_do_not_disagree():
    alike, apart = (_signals(SURE, SURE, torch.stack([SURE, one])) for one in (SURE, OTHER))
    assert alike["experts disagree"] == pytest.approx(0, abs=1e-6)
    assert apart["experts disagree"] == pytest.approx(math.log(2), abs=1e-4)
    assert alike["moved by the repair"] == pytest.approx(0, abs=1e-6)


def test_the_surest_expert_is_compared_with_the_answer_after_repair():
    experts = torch.stack([UNSURE, OTHER])
    same, other = (_signals(auto, UNSURE, experts) for auto in (OTHER, SURE))
    assert same["the surest expert disagrees"] == pytest.approx(0, abs=1e-6)
    assert other["the surest expert disagrees"] > 5
    assert _signals(UNSURE, UNSURE, experts)["entropy"] == pytest.approx(math.log(2))
    assert other["moved by the repair"] == pytest.approx(math.log(2), abs=1e-4)


def test_the_strongest_quarter_is_that_of_the_signal():
    costs = [(float(at), at / 10, -at / 100) for at in range(8)]
    strong, others = _rows("one", [0.0, 9.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0], costs)
    assert (strong.questions, strong.n, others.questions, others.n) == (STRONG, 2, OTHERS, 6)
    assert strong.kl_along == (1 + 4) / 2
    assert strong.nll_diff == pytest.approx(0.25)
    assert (strong.f1_low, strong.f1_high) == pytest.approx((-0.04, -0.01))
    assert others.kl_along == pytest.approx((0 + 2 + 3 + 5 + 6 + 7) / 6)


def test_the_command_prints_two_rows_a_signal(model_folder, tmp_path):
    data, texts = tmp_path / "set.jsonl", [{"text": text} for text in CHUNKS]
    row = {"question": "Who?", "answers": ["the keeper"], "chunks": texts}
    data.write_text("\n".join(json.dumps(row | {"id": at}) for at in range(4)))
    args = ["signals", str(data), "--model", model_folder, "--dtype", "float32", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["n"] for row in rows] == [1, 3] * 4
    assert all(row["kl_along"] > 0 for row in rows)


def test_three_questions_are_too_few(engine, tmp_path):
    data = tmp_path / "set.jsonl"
    row = {"question": "Who?", "answers": ["the keeper"], "chunks": [{"text": CHUNKS[0]}]}
    data.write_text("\n".join(json.dumps(row | {"id": at}) for at in range(3)))
    with pytest.raises(ConfigError, match="4 questions"):
        bench_signals(engine, load_examples(data, None))
