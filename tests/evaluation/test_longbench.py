"""LongBench's prompts are taken apart, and nothing of their contexts is lost."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cached_rag.evaluation.data import load_examples

_FILE = Path(__file__).parents[2] / "docs" / "longbench.py"
_SPEC = importlib.util.spec_from_file_location("longbench", _FILE)
longbench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(longbench)

PASSAGES = "Passage 1:\nRome\u2028is\nA city.\n\nPassage 2:\nBern\n" + "It is one, too.\n" * 300
# Of each form of prompt: what is before the context, and between it and the input, and behind.
FORMS = {
    "2wikimqa": ("The following are given passages.\n", "\n\nAnswer the question based on them. "
                 "Only so.\n\nQuestion: ", "\nAnswer:"),
    "multifieldqa_en": ("Read it and answer briefly.\n\n", "\n\nNow, answer the question.\n\n"
                        "Question: ", "\nAnswer:"),
    "narrativeqa": ("You are given a story.\n\nStory: ", "\n\nNow, answer it.\n\nQuestion: ",
                    "\n\nAnswer:"),
    "qmsum": ("You are given one.\n\nTranscript:\n", "\n\nNow, answer the query.\n\nQuery: ",
              "\nAnswer:"),
    "passage_retrieval_en": ("Say which paragraph the abstract is from.\n\n",
                             "\n\nThe following is an abstract.\n\n", "\n\nPlease enter it. "),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_is_taken_apart(name, tmp_path):
    before, between, behind = FORMS[name]
    prompt = f"{before}{PASSAGES}{between}Which is it?{behind}"
    whole = tmp_path / f"MiniLongBench_{name}.json"
    whole.write_text(json.dumps({"0": {"origin_prompt": prompt, "gold": ["Bern", "Berne"]}}))
    parts = tmp_path / f"{name}.jsonl"
    row = {"context": PASSAGES, "input": "Which is it?", "answers": ["Bern", "Berne"]}
    parts.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (made,), (same,) = (list(longbench.questions(path, name, 10**6)) for path in (whole, parts))
    assert made == same
    (tmp_path / "made").write_text(json.dumps(made))
    (example,) = load_examples(tmp_path / "made")
    assert example.question.endswith("Which is it?")
    assert example.answers == ("Bern", "Berne")
    assert len(example.chunks) > 2
    assert " ".join(example.chunks).split() == PASSAGES.split()
    assert not list(longbench.questions(whole, name, len(PASSAGES) - 1))
    assert example.chunks[0].endswith("A city.") or name != "2wikimqa"
    whole.write_text(json.dumps({"0": {"origin_prompt": "Why?", "gold": []}}))
    with pytest.raises(ValueError, match="row 0: not a prompt of this task"):
        list(longbench.questions(whole, name, 10**6))
