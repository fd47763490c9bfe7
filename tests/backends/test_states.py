"""Models some of whose layers keep a state: what is reused is exact, and only beginnings are."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    CHUNKS,
    HYBRIDS,
    NEW_PROMPTS,
    ask,
    plain_logits,
    random_ids,
    tiny_model,
    tiny_tokenizer,
)

from cached_rag import ConfigError, Engine, GenerationConfig, StoreConfig, wrap_model
from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers import batch, states
from cached_rag.errors import ModelError, RelocationError
from cached_rag.evaluation.machine import examine, self_test
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

TOLERANCE = 1e-4
LENGTH = 150
HEAD = "You answer questions about the documents below, briefly and exactly, in one sentence each."


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_that_goes_on_from_a_snapshot_equals_full_prefill(family):
    model = tiny_model(family)
    assert model.keeps_states
    ids, other = random_ids(LENGTH, 3), random_ids(LENGTH, 4)
    plain = plain_logits(model, ids)[-1]

    def going_on(begun, states=None):
        buffer = KVBuffer.like(model.shapes, LENGTH)
        model.prefill(buffer, torch.tensor([begun[:100]]), num_logits=0)
        buffer.states = buffer.states.copy() if states is None else states
        kept = buffer.states.copy()
        rows = torch.arange(100, LENGTH)
        return model.prefill(buffer, torch.tensor([ids]), rows).logits[0], kept

    resumed, kept = going_on(ids)
    assert torch.allclose(resumed, plain, atol=TOLERANCE)
    assert kept.length == 100
    assert kept.nbytes > 0
    again, _ = going_on(ids, kept)  # what went on has left the snapshot as it was
    assert torch.allclose(again, plain, atol=TOLERANCE)
    _, foreign = going_on(other)
    stale, _ = going_on(ids, foreign)  # control
    assert not torch.allclose(stale, plain, atol=1e-3)


def test_nothing_but_what_follows_the_states_can_be_computed():
    model = tiny_model("qwen3_5")
    ids = torch.tensor([random_ids(40, 3)])
    buffer = KVBuffer.like(model.shapes, 40)
    with pytest.raises(ModelError, match="nowhere"):
        model.prefill(buffer, ids, torch.arange(20, 40))
    model.prefill(buffer, ids[:, :20], num_logits=0)
    with pytest.raises(ModelError, match="behind token 20"):
        model.prefill(buffer, ids, torch.arange(30, 40))
    with pytest.raises(ModelError, match="scattered"):
        model.prefill(buffer, ids, torch.tensor([3, 39]))


def test_a_step_that_fails_can_be_tried_again(monkeypatch):
    model = tiny_model("qwen3_5")
    rows, wanted = [], []
    for seed in (3, 4):
        ids = random_ids(21, seed)
        buffer = KVBuffer.like(model.shapes, 21)
        model.prefill(buffer, torch.tensor([ids[:20]]), num_logits=0)
        rows.append(StepInput(RowKV(buffer, 20), ids[20:]))
        wanted.append(plain_logits(model, ids)[-1])

    def failing(decoder, row):
        step(decoder, row)
        if row is rows[1]:
            raise torch.OutOfMemoryError

    step = batch._step
    monkeypatch.setattr(batch, "_step", failing)
    with pytest.raises(torch.OutOfMemoryError):
        model.step(rows)
    monkeypatch.setattr(batch, "_step", step)
    assert torch.allclose(model.step(rows), torch.stack(wanted), atol=TOLERANCE)


def test_the_doctor_tries_what_there_is(opened):
    tests = self_test(opened)
    assert [test.name for test in tests] == ["full prefill", "going on from states"]
    assert all(test.passed for test in tests)
    facts = examine(opened)
    assert "keep a state" in facts["position_rule"]
    assert facts["prefill_tokens_per_s_512"] > 0


@pytest.fixture(scope="module", params=HYBRIDS)
def opened(request):
    with Engine(tiny_model(request.param)) as engine:
        yield engine


def asked(engine, messages, **options):
    """An answer that reuses what it can, which is full prefill's; and what it reused."""
    with Engine(engine.model, NEW_PROMPTS) as anew:
        plain = anew.generate(messages, method="full", max_tokens=12, ignore_eos=True)
    found = engine.generate(messages, max_tokens=12, ignore_eos=True, **options)
    assert found.token_ids == plain.token_ids
    return found


def test_the_next_turn_costs_what_is_new(opened):
    messages = ask(*CHUNKS, system=HEAD)
    first = asked(opened, messages)
    again = asked(opened, messages)
    assert again.report.cached_tokens > 0.9 * again.report.prompt_tokens
    later = [
        *messages,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    second = asked(opened, later)
    assert second.report.cached_tokens > 0.7 * second.report.prompt_tokens


def test_what_several_prompts_begin_with_is_kept_from_the_second_on(opened):
    opened.sequences.clear()
    opened.encode(CHUNKS)
    prompts = [ask(CHUNKS[0], CHUNKS[1], text, system=HEAD) for text in ("One.", "Two.", "Three.")]
    reused = [asked(opened, prompt).report.cached_tokens for prompt in prompts]
    assert reused[0] == 0
    assert reused[2] > 0.5 * opened.count_tokens(prompts[2])


def test_audits_are_refused_for_what_is_true(opened):
    with pytest.raises(ConfigError, match="layers keep states"):
        Engine(opened.model, StoreConfig(audit_rate=0.1))


def test_nobody_goes_on_where_a_forgotten_text_left_no_state(opened):
    opened.sequences.clear()
    opened.encode([[chunk] for chunk in CHUNKS])
    asked(opened, ask(*CHUNKS[:2], system=HEAD))
    opened.forget(CHUNKS[1:2])
    assert asked(opened, ask(CHUNKS[0], CHUNKS[2], system=HEAD)).report.kept_tokens == 0


def test_chunks_by_themselves_are_not_reused_and_it_is_said(opened):
    summary = opened.encode(CHUNKS)
    assert (summary.encoded, summary.present, summary.tokens) == (0, 0, 0)
    report = opened.generate(ask(*CHUNKS), max_tokens=1).report
    assert any("keep a state" in note for note in report.notes)
    with pytest.raises(RelocationError, match="keep a state"):
        opened.generate(ask(*CHUNKS), GenerationConfig(method="reuse", max_tokens=1))


def test_jamba_goes_on_by_token_however_often_it_is_wrapped():
    model = tiny_model("jamba")
    assert model.composer is None
    again = wrap_model(model.decoder.model, tiny_tokenizer(), name="again", revision="1")
    assert again.composer is None
    mixers = [m for m in model.decoder.model.modules() if states.reads_by_token(m)]
    assert len(mixers) == 2
    assert not any(states.reads_by_token(m) for m in tiny_model("qwen3_5").decoder.model.modules())
