"""Chunks encoded behind a context: right KV, own identity, chosen before the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, plain_cache, tiny_model

from cached_rag import ConfigError, Context, Engine, StoreConfig
from cached_rag.config import MOST_PRIMERS
from cached_rag.kv.positions import PositionRule
from cached_rag.library.encode import PRIMER, encode_chunks, join, primer
from cached_rag.library.matching import EncodedAfter


def head_of(engine):
    return engine.head(ask(CHUNKS[0]), CHUNKS[0])


def before(engine, behind, *passages):
    """The tokens that stand before a chunk behind these passages."""
    ids = list(behind.prefix_ids)
    for passage in passages:
        ids += engine.tokenization.literal(passage).ids + engine.tokenization.following("\n\n").ids
    return ids


def test_a_module_behind_a_context_is_what_full_prefill_makes_of_it_there(engine):
    engine.encode(CHUNKS[:1], head_of(engine), context=Context.fixed(CHUNKS[1]))
    (behind,) = engine.library.encoded_after()
    ids = tuple(engine.tokenization.literal(CHUNKS[0]).ids)
    kv = engine.library.shelf.fetch(behind, ids)
    first = before(engine, behind, CHUNKS[1])
    keys, values = plain_cache(engine.model, [*first, *ids])
    assert kv.start == len(first)
    assert torch.allclose(kv.keys, keys[:, :, len(first) :], atol=1e-4)
    assert torch.allclose(kv.values, values[:, :, len(first) :], atol=1e-4)
    engine.encode(CHUNKS[:1], head_of(engine), context=None)
    alone = engine.library.shelf.fetch(EncodedAfter(behind.prefix_ids), ids)
    assert not torch.allclose(kv.values[-1], alone.values[-1], atol=1e-2)  # control


def test_contexts_are_part_of_the_identity(engine):
    first, second = Context.fixed(CHUNKS[1]), Context.fixed(CHUNKS[2])
    for context in (None, first, second, first):
        engine.encode(CHUNKS[:1], head_of(engine), context=context)
    assert len({behind.context for behind in engine.library.encoded_after()}) == 3
    ids = engine.tokenization.literal(CHUNKS[0]).ids
    kvs = [engine.library.shelf.fetch(behind, ids) for behind in engine.library.encoded_after()]
    assert len({float(kv.values[-1].sum()) for kv in kvs}) == 3
    again = engine.encode(CHUNKS[:1], head_of(engine), context=second)
    assert (again.encoded, again.present) == (0, 1)


def test_the_first_module_is_exact_if_it_can_be_and_the_others_stand_in_context(engine):
    engine.encode(CHUNKS, head_of(engine), context=None)
    some = Context.fixed(*PRIMER.before("")[:2])  # all fit the context of a model this small
    engine.encode(CHUNKS, head_of(engine), context=some)
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
    texts = {CHUNKS[0]: [CHUNKS[1]], CHUNKS[1]: [CHUNKS[2], CHUNKS[0]], CHUNKS[2]: []}
    context = Context("own", lambda text: texts[text])
    assert engine.encode(CHUNKS, head_of(engine), context=context).encoded == 3
    (behind,) = engine.library.encoded_after()
    for text, passages in texts.items():
        kv = engine.library.shelf.fetch(behind, tuple(engine.tokenization.literal(text).ids))
        assert kv.start == len(before(engine, behind, *passages))


def test_a_mean_is_that_of_the_kv_in_each_context_moved_to_one_place(engine):
    texts = ((CHUNKS[1],), (CHUNKS[2], CHUNKS[1]), (CHUNKS[2],))
    context = Context.mean(*(Context.fixed(*one) for one in texts))
    done = engine.encode(CHUNKS[:1], head_of(engine), context=context)
    ids = tuple(engine.tokenization.literal(CHUNKS[0]).ids)
    assert done.tokens == 3 * len(ids)
    (behind,) = engine.library.encoded_after()
    kv = engine.library.shelf.fetch(behind, ids)
    found = []
    for one in texts:
        first = before(engine, behind, *one)
        keys, values = (
            side[:, :, len(first) :] for side in plain_cache(engine.model, [*first, *ids])
        )
        moved = torch.empty_like(keys)
        engine.model.rule.relocate(keys, kv.start - len(first), moved)
        found.append((moved, values))
    assert kv.start == len(before(engine, behind, CHUNKS[1]))
    for side, each in zip((kv.keys, kv.values), zip(*found, strict=True), strict=True):
        assert torch.allclose(side, torch.stack(each).mean(0), atol=1e-4)
        assert not torch.allclose(side, each[0], atol=1e-2)  # control


def test_a_mean_has_the_tokens_of_all_its_passes_as_its_total(engine):
    totals, done = [], []
    two = Context.mean(Context.fixed(CHUNKS[1]), Context.fixed(CHUNKS[2]))
    engine.encode(
        CHUNKS[:1],
        head_of(engine),
        context=two,
        token_progress=done.append,
        token_total=totals.append,
    )
    assert totals == [sum(done)] == [2 * len(engine.tokenization.literal(CHUNKS[0]).ids)]


def test_a_mean_of_one_is_that_one_and_of_none_or_of_means_an_error():
    one, two = Context.fixed(CHUNKS[0]), Context.fixed(CHUNKS[1])
    assert Context.mean(one) is one
    for wrong in ((), (one, Context.mean(one, two))):
        with pytest.raises(ConfigError, match="mean"):
            Context.mean(*wrong)


def test_a_mean_is_preferred_to_a_single_context(engine):
    for context in (PRIMER, primer(2), primer(3), None):
        engine.encode(CHUNKS, head_of(engine), context=context)
    kinds = [behind.context.split(":")[0] for behind in engine.library.encoded_after()]
    assert kinds == ["mean", "mean", "fixed", ""]
    _, plan = engine.plan(ask(*CHUNKS), "reuse", engine.prefill(ask(*CHUNKS)).report)
    last = plan.matches[-1].encoded_after
    assert last.context.startswith("mean:")


def test_where_keys_cannot_be_moved_a_chunk_is_encoded_in_one_context():
    fixed = replace(tiny_model("llama"), rule=PositionRule(reason="a test"))
    with Engine(fixed, StoreConfig()) as engine:
        done = engine.encode(CHUNKS[:1], head_of(engine), context=primer(3))
        assert done.tokens == len(engine.tokenization.literal(CHUNKS[0]).ids)


def test_joined_modules_are_moved_right_behind_each_other():
    model = tiny_model("llama")
    (prefix,) = encode_chunks(model, [None], [(3, 4, 5)])
    one, two = encode_chunks(model, [prefix], [(6, 7, 8, 9), (10, 11)])
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


def test_primers_are_some_passages_each_and_have_names():
    assert primer(1) is PRIMER
    assert len(primer(MOST_PRIMERS).ways) == MOST_PRIMERS == 3
    for way in (PRIMER, *primer(MOST_PRIMERS).others):
        passages = way.before("anything")
        assert len(passages) == 4
        assert way.name == Context.fixed(*passages).name
        assert way.name != Context.fixed(*passages[:3]).name
    assert len({primer(count).name for count in (1, 2, 3)}) == 3
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match="1 to 3"):
            primer(wrong)


def test_an_engine_encodes_behind_as_many_primers_as_it_is_told():
    assert Engine(tiny_model("llama")).primer == PRIMER
    with Engine(tiny_model("llama"), StoreConfig(primers=2)) as engine:
        assert engine.primer == primer(2)
        once = len(engine.tokenization.literal(CHUNKS[0]).ids)
        assert engine.encode(CHUNKS[:1], context=engine.primer).tokens == 2 * once
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match="primers must be 1 to 3"):
            StoreConfig(primers=wrong)


def test_passages_that_do_not_fit_are_left_out_farthest_first(engine):
    room = engine.model.context_length
    long = " ".join(["lamp"] * room)
    engine.encode(CHUNKS[:1], head_of(engine), context=Context.fixed(long, CHUNKS[1]))
    (behind,) = engine.library.encoded_after()
    kv = engine.library.shelf.fetch(behind, engine.tokenization.literal(CHUNKS[0]).ids)
    assert kv.start == len(before(engine, behind, CHUNKS[1]))


def elsewhere(engine, context=None):
    """Encode all chunks as other prompts have them, which say something else first."""
    other = [{"role": "system", "content": "You are a lamp. Be bright."}, *ask(CHUNKS[0])]
    engine.encode(CHUNKS, engine.head(other, CHUNKS[0]), context=context)


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
    engine.encode(CHUNKS, context=None)
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


def test_passages_with_kv_are_encoded_again_where_keys_cannot_be_moved():
    """As `cached-rag eval @neighbours` has it: nothing first, then the neighbours."""
    near = Context("neighbours:2", lambda text: [chunk for chunk in CHUNKS if chunk != text])
    with Engine(tiny_model("gpt2"), NEW_PROMPTS) as engine:
        assert engine.encode(CHUNKS, context=[None, near]).encoded == len(CHUNKS)
        ids = engine.library.table.get(CHUNKS[0]).token_ids
        kvs = {
            b.context: engine.library.shelf.fetch(b, ids) for b in engine.library.encoded_after()
        }
    with Engine(tiny_model("gpt2"), NEW_PROMPTS) as engine:  # of passages without KV
        engine.encode(CHUNKS, context=[near])
        (behind,) = engine.library.encoded_after()
        twin = engine.library.shelf.fetch(behind, ids)
    torch.testing.assert_close(kvs["neighbours:2"].keys, twin.keys)
