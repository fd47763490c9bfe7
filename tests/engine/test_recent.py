"""KV of finished answers, kept for prompts to come that begin alike."""

from __future__ import annotations

import pytest
from conftest import tiny_model
from crowd import ASKED, DOCUMENTS, GREEDY, SYSTEM, alone

from cached_rag import Engine, StoreConfig

# One of each kind of layers; `test_sharing.py` asks all families.
KINDS = ("llama", "gpt2", "gemma3", "gemma4", "lfm2", "llama4", "gpt_oss")


def test_recent_answers_let_a_conversation_go_on_where_it_was():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26, keeps_repaired=False))
    turns = [{"role": "user", "content": f"{DOCUMENTS[0]} Why is it green?"}]
    first = engine.generate(turns, max_tokens=8)
    assert first.report.cached_tokens == 0
    said = {"role": "assistant", "content": first.text}
    turns += [said, {"role": "user", "content": "And nobody knew?"}]
    second = engine.generate(turns, max_tokens=8)
    twin = Engine(tiny_model("llama")).generate(turns, max_tokens=8)
    assert second.token_ids == twin.token_ids
    assert second.report.cached_tokens >= first.report.prompt_tokens - 1
    assert second.report.prompt_tokens == twin.report.prompt_tokens
    other = engine.tenant("other").generate(turns, max_tokens=8)
    assert other.report.cached_tokens == 0


def test_recent_answers_go_when_longest_unused():
    model = tiny_model("llama")
    room = 1200 * model.shapes.bytes_per_token
    engine = Engine(model, StoreConfig(sequence_bytes=room))
    asked = [f"{letter} is another beginning. {SYSTEM}" for letter in "ABC"]

    def cached(prompt):
        report = engine.generate(prompt, **GREEDY).report
        assert engine.sequences.nbytes <= room
        assert engine.scheduler.nbytes == 0
        return report.cached_tokens > 0

    assert [cached(prompt) for prompt in asked[:2]] == [False, False]
    assert cached(asked[0])
    assert not cached(asked[2])  # for which B had to go
    assert cached(asked[0])
    assert not cached(asked[1])
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone("llama", ASKED, **GREEDY)


@pytest.mark.parametrize("family", KINDS)
def test_recent_beginnings_give_the_same_answers(family):
    engine = Engine(tiny_model(family), StoreConfig(sequence_bytes=1 << 26, keeps_repaired=False))
    found = [engine.generate(prompt, **GREEDY) for prompt in ASKED]
    assert [answer.token_ids for answer in found] == alone(family, ASKED, **GREEDY)
    assert all(answer.report.cached_tokens > 100 for answer in found[1:])


def test_recent_answers_are_kept_only_where_exact():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26, keeps_repaired=False))
    engine.encode(DOCUMENTS, context=None)
    prompt = f"See: {DOCUMENTS[0]}\nWhy?"
    engine.generate(prompt, method="reuse", max_tokens=4)
    assert engine.sequences.nbytes == 0
    assert engine.generate(prompt, method="full", max_tokens=4).report.cached_tokens == 0


def test_what_only_finished_prompts_have_left_is_copied_and_what_a_running_one_has_is_shared():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
    token = engine.model.shapes.bytes_per_token
    engine.generate(ASKED[0], **GREEDY)
    first = engine.stream(ASKED[1], **(GREEDY | {"max_tokens": 24}))
    next(first)
    assert first.report.kept_tokens > 128
    assert first.report.shared_kv_bytes == 0
    second = engine.generate(ASKED[0], **GREEDY)  # of which all was left
    whole = second.report.prompt_tokens - 1
    assert second.report.kept_tokens == whole
    assert 128 < second.report.shared_kv_bytes // token < whole
    "".join(first)
    (expected,) = alone("llama", ASKED[:1], **GREEDY)
    assert second.token_ids == expected
