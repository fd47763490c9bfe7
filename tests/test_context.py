"""Chunks encoded behind a context: right KV, own identity, chosen before the plain one."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, plain_cache, tiny_model
from test_engine import ask

from cached_rag import Context, Engine, StoreConfig
from cached_rag.library.context import PRIMER
from cached_rag.library.encode import encode_chunks, encode_prefix, join
from cached_rag.library.matching import EncodedAfter


def head_of(engine):
    return engine.head(ask(CHUNKS[0]), CHUNKS[0])


def test_a_module_behind_a_context_is_what_full_prefill_makes_of_it_there(engine):
    engine.encode(CHUNKS[:1], head_of(engine), context=Context.fixed(CHUNKS[1]))
    (behind,) = engine.library.encoded_after()
    ids = tuple(engine.tokenization.literal(CHUNKS[0]).ids)
    passage = engine.tokenization.literal(CHUNKS[1]).ids
    kv = engine.library.fetch(behind, ids)
    before = [*behind.prefix_ids, *passage]
    keys, values = plain_cache(engine.model, [*before, *ids])
    assert kv.start == len(before)
    assert torch.allclose(kv.keys, keys[:, :, len(before) :], atol=1e-4)
    assert torch.allclose(kv.values, values[:, :, len(before) :], atol=1e-4)
    engine.encode(CHUNKS[:1], head_of(engine))
    alone = engine.library.fetch(EncodedAfter(behind.prefix_ids), ids)
    assert not torch.allclose(kv.values[-1], alone.values[-1], atol=1e-2)  # control


def test_contexts_are_part_of_the_identity(engine):
    first, second = Context.fixed(CHUNKS[1]), Context.fixed(CHUNKS[2])
    for context in (None, first, second, first):
        engine.encode(CHUNKS[:1], head_of(engine), context=context)
    assert len({behind.context for behind in engine.library.encoded_after()}) == 3
    ids = engine.tokenization.literal(CHUNKS[0]).ids
    kvs = [engine.library.fetch(behind, ids) for behind in engine.library.encoded_after()]
    assert len({float(kv.values[-1].sum()) for kv in kvs}) == 3
    again = engine.encode(CHUNKS[:1], head_of(engine), context=second)
    assert (again.encoded, again.present) == (0, 1)


def test_the_first_module_is_exact_if_it_can_be_and_the_others_stand_in_context(engine):
    engine.encode(CHUNKS, head_of(engine))
    engine.encode(CHUNKS, head_of(engine), context=PRIMER)
    _, plan = engine.plan(ask(*CHUNKS), "reuse", engine.prefill(ask(*CHUNKS)).report)
    modules = [place for place in plan.placements if place.is_chunk]
    assert [place.is_exact for place in modules] == [True, False, False]
    far = [place.kv.start for place in modules]
    assert far[0] < far[1] == far[2]


def test_r_1_behind_a_context_is_full_prefill(engine):
    engine.encode(CHUNKS, head_of(engine), context=PRIMER)
    full = engine.prefill(ask(*CHUNKS), method="full").logits
    whole = engine.prefill(ask(*CHUNKS), method="prophetkv", recompute_ratio=1.0)
    assert whole.report.modules_hit == 3
    assert torch.allclose(whole.logits, full, atol=1e-4)
    assert not torch.allclose(engine.prefill(ask(*CHUNKS), method="reuse").logits, full, atol=1e-2)


def test_different_texts_before_different_modules(engine):
    before = {CHUNKS[0]: [CHUNKS[1]], CHUNKS[1]: [CHUNKS[2], CHUNKS[0]], CHUNKS[2]: []}
    context = Context("own", lambda text: before[text])
    assert engine.encode(CHUNKS, head_of(engine), context=context).encoded == 3
    (behind,) = engine.library.encoded_after()
    ids = {text: tuple(engine.tokenization.literal(text).ids) for text in CHUNKS}
    for text, passages in before.items():
        kv = engine.library.fetch(behind, ids[text])
        assert kv.start == len(behind.prefix_ids) + sum(len(ids[passage]) for passage in passages)


def test_joined_modules_are_moved_right_behind_each_other():
    model = tiny_model("llama")
    prefix = encode_prefix(model, (3, 4, 5))
    one, two = encode_chunks(model, prefix, [(6, 7, 8, 9), (10, 11)])
    joined = join(model, join(model, prefix, one), two)
    assert joined.token_ids == (3, 4, 5, 6, 7, 8, 9, 10, 11)
    keys, _ = plain_cache(model, joined.token_ids)
    assert torch.allclose(joined.keys[:, :, :7], keys[:, :, :7], atol=1e-4)
    assert torch.allclose(joined.keys[0], keys[0], atol=1e-4)  # layer 0 depends on position alone


def test_contexts_survive_a_restart(tmp_path):
    settings = StoreConfig(path=str(tmp_path))
    with Engine(tiny_model("llama"), settings) as engine:
        engine.encode(CHUNKS, head_of(engine), context=PRIMER)
    with Engine(tiny_model("llama"), settings) as engine:
        assert [behind.context for behind in engine.library.encoded_after()] == [PRIMER.name]
        assert engine.prefill(ask(*CHUNKS), method="reuse").report.modules_hit == 3
        assert engine.encode(CHUNKS, head_of(engine), context=PRIMER).encoded == 0


def test_the_primer_is_some_passages_and_has_a_name():
    passages = PRIMER.before("anything")
    assert len(passages) == 4
    assert PRIMER.name == Context.fixed(*passages).name
    assert PRIMER.name != Context.fixed(*passages[:3]).name


def test_passages_that_do_not_fit_are_left_out_farthest_first(engine):
    room = engine.model.context_length
    long = " ".join(["lamp"] * room)
    engine.encode(CHUNKS[:1], head_of(engine), context=Context.fixed(long, CHUNKS[1]))
    (behind,) = engine.library.encoded_after()
    kv = engine.library.fetch(behind, engine.tokenization.literal(CHUNKS[0]).ids)
    assert kv.start == len(behind.prefix_ids) + len(engine.tokenization.literal(CHUNKS[1]).ids)


def elsewhere(engine, **options):
    """Encode all chunks as other prompts have them, which say something else first."""
    other = [{"role": "system", "content": "You are a lamp. Be bright."}, *ask(CHUNKS[0])]
    engine.encode(CHUNKS, engine.head(other, CHUNKS[0]), **options)


@pytest.mark.parametrize("context", [None, PRIMER])
def test_chunks_behind_another_head_serve_approximately(engine, context):
    elsewhere(engine, context=context)
    done = engine.prefill(ask(*CHUNKS), method="auto")
    assert (done.report.modules_hit, done.report.modules_missed) == (3, 0)
    assert done.report.recomputed_tokens > 0
    assert not any(place.is_exact for place in done.plan.placements)
    assert engine.prefill(ask(*CHUNKS), method="prefix").report.cached_tokens == 0
    full = engine.prefill(ask(*CHUNKS), method="full").logits
    whole = engine.prefill(ask(*CHUNKS), method="prophetkv", recompute_ratio=1.0)
    assert torch.allclose(whole.logits, full, atol=1e-4)


def test_a_better_encoding_is_preferred_to_one_behind_another_head(engine):
    def used():
        _, plan = engine.plan(ask(*CHUNKS), "reuse", engine.prefill(ask(*CHUNKS)).report)
        return {(len(m.encoded_after.prefix_ids), m.encoded_after.context) for m in plan.matches}

    elsewhere(engine)
    ((other, _),) = used()
    engine.encode(CHUNKS)
    ((alone, _),) = used()
    assert alone < other
    elsewhere(engine, context=PRIMER)  # the primer matters more than the head
    assert used() == {(other, PRIMER.name)}
    engine.encode(CHUNKS, context=PRIMER)
    assert used() == {(alone, PRIMER.name)}
    engine.encode(CHUNKS, head_of(engine), context=PRIMER)
    ((own, context),) = used()
    assert alone < own < other
    assert context == PRIMER.name


def test_other_heads_are_those_of_the_same_tenant(engine):
    elsewhere(engine)
    with engine.tenant("other") as tenant:
        assert tenant.prefill(ask(*CHUNKS)).report.modules_hit == 0
