"""What README and docs/serving.md say that answers made at the same time share."""

from __future__ import annotations

import pytest
from conftest import tiny_model

from cached_rag import Engine

SYSTEM = " ".join(f"Rule {n}: be brief and exact about number {n}." for n in range(8))
CHUNKS = [
    " ".join(f"Fact {letter}{n}: copper met oxygen in year {n}." for n in range(9))
    for letter in "AB"
]


def shared_tokens(method, beginning, *texts):
    """Of three prompts over the same texts, the tokens that the second one shares."""
    engine = Engine(tiny_model("llama"))
    engine.encode(CHUNKS)
    prompts = ["\n".join([beginning, *texts, f"Question {n}: why?"]) for n in range(3)]
    answers = engine.generate_batch(prompts, method=method, max_tokens=4)
    return answers[1].report.shared_kv_bytes // engine.model.shapes.bytes_per_token


@pytest.mark.parametrize("method", ["auto", "reuse", "full"])
def test_a_beginning_without_known_texts_is_shared(method):
    assert shared_tokens(method, SYSTEM) >= 128


def test_chunks_are_shared_only_where_they_are_not_repaired():
    whole = shared_tokens("auto", SYSTEM)
    head = shared_tokens("auto", SYSTEM, *CHUNKS)
    assert 128 <= head <= whole  # what stands before the first chunk
    assert shared_tokens("auto", "Answer.", *CHUNKS) == 0
    for method in ("reuse", "full", "prefix"):
        assert shared_tokens(method, "Answer.", *CHUNKS) > 128
    assert shared_tokens("reuse", SYSTEM, *CHUNKS) > head + 128
