"""The benchmark of chains runs, on the tiny model: the same weights behind both integrations."""

from __future__ import annotations

import pytest
from conftest import CHUNKS
from typer.testing import CliRunner

from cached_rag.evaluation.data import Example
from docs.experiments import langchain as benchmark

EXAMPLES = [
    Example("1", "What turned green?", ("copper",), tuple(CHUNKS)),
    Example("2", "Who lit the lamp?", ("the keeper",), tuple(reversed(CHUNKS))),
]

pytestmark = pytest.mark.filterwarnings("ignore")  # the pipeline warns of everything


def test_the_three_answer_the_same_questions(engine):
    engine.model.decoder.model.generation_config.pad_token_id = 1
    told = []
    found = benchmark.run(engine, EXAMPLES, 4, lambda *answer: told.append(answer), pause=0)
    assert [row["name"] for row in found["rows"]] == [
        "ChatHuggingFace",
        "ChatCachedRAG, full",
        "ChatCachedRAG",
    ]
    tokens = sum(len(engine.tokenization.literal(chunk).ids) for chunk in CHUNKS)
    assert found["encoded"]["modules"] == 3
    assert found["encoded"]["tokens"] == pytest.approx(2 * tokens, abs=6)  # less at the borders
    assert 0 < found["charged_recompute"] < 1
    assert found["overhead_ms"] > 0
    answers = {(name, example.id): text for name, example, text in told}
    assert len(answers) == 6
    for number in "12":  # greedy decoding of one model: the same words
        full = answers["ChatCachedRAG, full", number]
        assert answers["ChatHuggingFace", number].strip() == full.strip()


def test_a_missing_set_is_named(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(benchmark.main)
    result = CliRunner().invoke(app, ["--data", str(tmp_path / "none.jsonl")])
    assert result.exit_code != 0
    assert "cannot read" in str(result.exception)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert "--questions" in shown.output
