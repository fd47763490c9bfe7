"""Made questions: each has one answer, in one place, and a seed gives the same file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cached_rag.evaluation.data import load_examples
from cached_rag.evaluation.measure import right

_FILE = Path(__file__).parents[2] / "docs" / "made_questions.py"
_SPEC = importlib.util.spec_from_file_location("made_questions", _FILE)
made_questions = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(made_questions)


@pytest.mark.parametrize("kind", made_questions.KINDS)
@pytest.mark.parametrize("chunks", [2, 8, 80])
def test_an_answer_stands_in_one_chunk_and_nowhere_in_the_question(kind, chunks, tmp_path):
    rows = list(made_questions.made([kind], 20, chunks, seed=3))
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for example in load_examples(tmp_path / "made.jsonl"):
        assert len(example.chunks) == chunks
        assert sum(right(chunk, example.answers) for chunk in example.chunks) == 1
        assert not right(example.question, example.answers)


def test_a_seed_gives_the_same_questions_and_another_one_others():
    kinds = list(made_questions.KINDS)
    first, again, other = (list(made_questions.made(kinds, 14, 4, seed)) for seed in (0, 0, 1))
    assert first == again
    assert not {row["question"] for row in first} & {row["question"] for row in other}


@pytest.mark.parametrize("kind", [kind for kind in made_questions.KINDS if kind != "needle"])
def test_chunks_are_drawn_from_a_document_with_all_that_the_answer_needs(kind, tmp_path):
    rows = list(made_questions.made([kind], 20, 8, seed=3, of=24))
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for example in load_examples(tmp_path / "made.jsonl"):
        assert (len(example.chunks), len(example.document)) == (8, 24)
        assert set(example.chunks) < set(example.document)
        assert sum(right(chunk, example.answers) for chunk in example.chunks) == 1
        assert kind != "hops" or sum(c.split("\n")[0] in example.question for c in example.chunks)


def test_chunks_are_read_with_those_of_other_questions_of_their_kind(tmp_path):
    rows = list(made_questions.made(["parts", "codes"], 10, 4, seed=3))
    made_questions.indexed(rows, seed=3)
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = load_examples(tmp_path / "made.jsonl")
    for kind in (examples[::2], examples[1::2]):
        assert {one.document for one in kind} == {kind[0].document}
        assert sorted(kind[0].document) == sorted(chunk for one in kind for chunk in one.chunks)
        assert kind[0].document[:4] != kind[0].chunks  # mixed
