"""The guard at run time: what is measured of live answers, and what follows if it is bad."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.engine.idle import Audits
from cached_rag.methods import spelled
from cached_rag.server.endings import Metrics

PROMPT = "\n\n".join(CHUNKS) + "\n\nWhat turns green?"


@pytest.fixture
def audited():
    made = []

    def make(rate=1.0, **options) -> Engine:
        store = StoreConfig(sequence_bytes=0, audit_rate=rate, **options)
        engine = Engine(tiny_model("llama"), store)
        engine.encode(CHUNKS, context=None)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def first_logits(engine, method, prompt=PROMPT):
    request = engine.prefill(prompt, method=method)
    logits = request.logits[-1].clone()
    request.release()
    return logits.log_softmax(-1)


def test_an_audit_finds_what_two_prefills_find(audited):
    engine = audited()
    full, own = first_logits(engine, "full"), first_logits(engine, "reuse")
    engine.generate(PROMPT, method="reuse", max_tokens=3)
    engine.write_back.drain()
    audit = engine.audits.found()["reuse"]
    assert audit.count == 1
    assert audit.kl == pytest.approx(float((full.exp() * (full - own)).sum()), rel=1e-3)
    assert audit.kl > 1e-4
    assert audit.agreement == float(full.argmax() == own.argmax())


def test_a_sample_is_audited(audited):
    engine = audited(rate=0.25)
    for _ in range(8):
        engine.generate(PROMPT, method="reuse", max_tokens=1)
    engine.write_back.drain()
    assert engine.audits.found()["reuse"].count == 2


def test_what_is_exact_is_not_audited(audited):
    engine = audited()
    for method in ("full", "prefix", "cacheblend:recompute_ratio=1"):
        engine.generate(PROMPT, method=method, max_tokens=1)
    engine.generate("A prompt without any known text in it.", max_tokens=1)
    engine.write_back.drain()
    assert not engine.audits.found()


def test_nothing_is_audited_unless_asked_for(audited):
    engine = audited(rate=0.0)
    engine.generate(PROMPT, method="reuse", max_tokens=1)
    engine.write_back.drain()
    assert not engine.audits.found()


def spoil(engine):
    """Replace the chunks' KV in memory by noise, as a bug might."""
    (tier,) = engine.library.shelf.memory
    for kv in tier.held.values():
        if kv.seq_len > 1:
            with torch.inference_mode():
                kv.keys.normal_(0, 9)
                kv.values.normal_(0, 9)


def test_a_method_that_goes_wrong_is_used_no_more(audited):
    engine = audited(audit_limit=0.2)
    spoil(engine)
    for _ in range(8):
        assert engine.generate(PROMPT, method="reuse", max_tokens=4).report.method == "reuse"
    engine.write_back.drain()
    answer = engine.generate(PROMPT, method="reuse", max_tokens=4)
    assert answer.report.method == "full"
    assert "reuse is used no more" in answer.report.notes[-1]
    assert answer.text == engine.generate(PROMPT, method="full", max_tokens=4).text
    tenant = engine.tenant("other")  # the model is the same
    tenant.encode(CHUNKS, context=None)
    assert tenant.generate(PROMPT, method="reuse", max_tokens=1).report.method == "full"
    other = engine.generate(PROMPT, method="epic", max_tokens=1)  # which was not audited yet
    assert other.report.method == "epic"


def test_a_method_that_does_well_is_kept(audited):
    engine = audited(audit_limit=0.2)
    for _ in range(10):
        report = engine.generate(PROMPT, method="reuse", max_tokens=1).report
        assert (report.method, report.notes) == ("reuse", [])
    engine.write_back.drain()
    assert not engine.audits.objection("reuse")


def test_seven_audits_judge_nothing_and_old_ones_are_left_behind():
    audits = Audits(1.0, 0.5)
    for _ in range(7):
        audits.note("auto", 9.0, agrees=False)
    assert not audits.objection("auto")
    audits.note("auto", 9.0, agrees=False)
    assert "9.00 nats in the last 8 audits" in audits.objection("auto")
    for _ in range(64):
        audits.note("auto", 0.0, agrees=True)
    assert not audits.objection("auto")
    assert audits.found()["auto"].count == 64


def test_each_answer_of_a_batch_is_audited(audited):
    """Of each its own first token is compared, also when others decode beside it."""
    engine = audited()
    prompts = [PROMPT, "\n\n".join(CHUNKS[::-1]) + "\n\nWhat is red?"]
    expected = 0.0
    for prompt in prompts:
        full, own = first_logits(engine, "full", prompt), first_logits(engine, "reuse", prompt)
        expected += float((full.exp() * (full - own)).sum())
    engine.generate_batch(prompts, method="reuse", max_tokens=8)
    engine.write_back.drain()
    audit = engine.audits.found()["reuse"]
    assert audit.count == 2
    assert audit.kl == pytest.approx(expected / 2, rel=1e-3)


def test_settings():
    with pytest.raises(ConfigError, match="audit_rate must be 0 to 1"):
        StoreConfig(audit_rate=2)
    with pytest.raises(ConfigError, match="positive"):
        StoreConfig(audit_limit=0)
    with pytest.raises(ConfigError, match="background"):
        StoreConfig(audit_rate=0.1, write_back=False)


def test_metrics_and_an_index_have_it(audited, tmp_path):
    engine = audited()
    engine.generate(PROMPT, method="epic:anchor_tokens=4", max_tokens=1)
    engine.write_back.drain()
    lines = Metrics(engine).text().decode().splitlines()
    assert 'cached_rag_audit{figure="count",method="epic"} 1.0' in lines
    engine.audits.note("epic", engine.audits.found()["epic:anchor_tokens=4"].kl + 2, agrees=False)
    lines = Metrics(engine).text().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("cached_rag_audit{"))
    assert float(found['cached_rag_audit{figure="count",method="epic"}']) == 2
    assert float(found['cached_rag_audit{figure="kl",method="epic"}']) > 1
    with CachedRAG.open(tmp_path, embedding=WordEmbedding(), audit_rate=0.5) as rag:
        assert rag._folder.store.audit_rate == 0.5


def test_options_of_a_method_are_judged_by_themselves(audited):
    """Else whoever may choose options could have `auto` barred for all others."""
    engine = audited(audit_limit=1e-9)
    for _ in range(8):
        engine.generate(
            PROMPT, method="anchorflow:recompute_ratio=0.0,anchor_tokens=0", max_tokens=1
        )
    engine.write_back.drain()
    (name,) = engine.audits.found()
    barred = engine.generate(PROMPT, method=name, max_tokens=1)
    assert any("used no more" in note for note in barred.report.notes)
    assert not engine.generate(PROMPT, method="auto", max_tokens=1).report.notes


@pytest.mark.parametrize(
    "text",
    ["reuse", "epic:anchor_tokens=3", "cacheblend:check_layer=2", "epic:anchor_tokens=4+infoflow"],
)
def test_methods_are_spelled_as_they_are_read(text):
    method = GenerationConfig(method=text).selector()
    assert GenerationConfig(method=spelled(method)).selector() == method
    assert spelled(method) == text
