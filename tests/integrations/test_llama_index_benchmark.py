"""The benchmark of query engines runs, on the tiny model: the same weights behind both."""

from __future__ import annotations

import pytest
import typer
from conftest import CHUNKS
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.llms.cached_rag import CachedRAGLLM
from typer.testing import CliRunner

from cached_rag.evaluation.data import Example
from docs.experiments import llama_index as benchmark

EXAMPLES = [
    Example("1", "What turned green?", ("copper",), tuple(CHUNKS)),
    Example("2", "Who lit the lamp?", ("the keeper",), tuple(reversed(CHUNKS))),
]

pytestmark = pytest.mark.filterwarnings("ignore")  # the pipeline warns of everything


def test_the_three_answer_the_same_questions(engine):
    engine.model.decoder.model.generation_config.pad_token_id = 1
    nodes = benchmark.from_set(EXAMPLES)
    assert [node.text for node in nodes] == CHUNKS
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(4))
    retriever = index.as_retriever(similarity_top_k=3)
    told = []
    found = benchmark.run(
        engine, retriever, nodes, EXAMPLES, 4, lambda *answer: told.append(answer), pause=0
    )
    names = [row["name"] for row in found["rows"]]
    assert names == ["HuggingFaceLLM", "CachedRAGLLM, full", "CachedRAGLLM"]
    assert found["encoded"]["modules"] == 3
    assert 0 < found["charged_recompute"] < 1
    answers = {(name, example.id): text for name, example, text in told}
    assert len(answers) == 6
    for number in "12":  # greedy decoding of one model: the same words
        full = answers["CachedRAGLLM, full", number]
        assert answers["HuggingFaceLLM", number].strip() == full.strip()


def test_a_folder_becomes_questions_and_nodes(engine, tmp_path):
    (tmp_path / "a.rst").write_text(f"PEP: 1\nTitle: Of Copper\n\n{CHUNKS[1]}")
    (tmp_path / "b.txt").write_text(CHUNKS[0])
    examples, nodes = benchmark.from_folder(tmp_path, 5, CachedRAGLLM(engine=engine))
    assert [example.question for example in examples] == [
        "What does the document on 'Of Copper' propose?",
        "What does the document on 'b' propose?",
    ]
    assert len(nodes) >= 2


def test_the_command_says_what_it_wants():
    app = typer.Typer()
    app.command()(benchmark.main)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert "--corpus" in shown.output
    assert CliRunner().invoke(app, []).exit_code == 2
