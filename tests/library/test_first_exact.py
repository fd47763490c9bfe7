"""Chunks that are encoded behind a head alone, too: exact where they stand first in a prompt."""

from __future__ import annotations

import time

import pytest
from conftest import CHUNKS, ask, tiny_model
from langchain_cached_rag import ChatCachedRAG
from llama_index.llms.cached_rag import CachedRAGLLM
from test_context import head_of

from cached_rag import PRIMER, ConfigError, Engine, StoreConfig
from cached_rag.library.encode import primer
from cached_rag.library.matching import EncodedAfter
from cached_rag.rag.folder import IndexConfig


def on_disk(folder, **options):
    return StoreConfig(path=str(folder / "kv"), sequence_bytes=0, **options)


@pytest.fixture
def twice(tmp_path):
    """An engine as it is unless told otherwise."""
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        yield engine


@pytest.fixture
def once(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path, first_exact=False)) as engine:
        yield engine


def ids_of(engine, chunk):
    return tuple(engine.tokenization.literal(chunk).ids)


def test_of_several_contexts_each_is_a_pass_of_its_own(engine):
    totals, done = [], []
    counted = {"token_total": totals.append, "token_progress": done.append}
    both = (PRIMER, None)
    engine.encode(CHUNKS[:1], head_of(engine), context=None)
    first = engine.encode(CHUNKS, head_of(engine), context=both, **counted)
    once = [len(ids_of(engine, chunk)) for chunk in CHUNKS]
    assert totals == [sum(done)] == [first.tokens] == [2 * sum(once) - once[0]]
    assert (first.encoded, first.present) == (3, 0)
    behind = engine.library.encoded_after()
    assert {one.context for one in behind} == {PRIMER.name, ""}
    assert all(engine.library.shelf.holds(one, ids_of(engine, c)) for one in behind for c in CHUNKS)
    again = engine.encode(CHUNKS, head_of(engine), context=both)
    assert (again.encoded, again.present, again.tokens) == (0, 3, 0)
    for wrong, why in (((), "None stands for nothing"), ("primer", "not 'primer'")):
        with pytest.raises(ConfigError, match=why):
            engine.encode(CHUNKS, context=wrong)


def test_texts_are_encoded_as_the_store_says(once, engine):
    def contexts(one):
        return {behind.context for behind in one.library.encoded_after()}

    once.encode(CHUNKS, head_of(once))
    assert contexts(once) == {PRIMER.name}
    once.encode(CHUNKS, head_of(once), context=None)
    assert contexts(once) == {PRIMER.name, ""}
    engine.encode(CHUNKS)  # without a head there is nothing to be exact behind
    assert contexts(engine) == {PRIMER.name}
    engine.encode(CHUNKS, head_of(engine))
    assert contexts(engine) == {PRIMER.name, ""}
    with Engine(once.model, StoreConfig(primers=2, first_exact=False)) as other:
        other.encode(CHUNKS, head_of(other))
        assert contexts(other) == {primer(2).name}


def test_the_store_says_whether_and_only_behind_a_head(engine, once):
    assert engine.contexts(head_of(engine)) == (PRIMER, None)
    assert engine.contexts(None) == once.contexts(None) == (PRIMER,)
    assert once.contexts(head_of(once)) == (PRIMER,)


def test_index_engine_and_frameworks_have_one_default():
    made = (StoreConfig(), IndexConfig(), ChatCachedRAG(model="tiny"), CachedRAGLLM(model="tiny"))
    assert {(one.primers, one.first_exact) for one in made} == {(1, True)}


def test_the_first_chunk_is_exact_and_costs_nothing(twice):
    def report(plan_for):
        done = twice.prefill(ask(*CHUNKS), method="auto")
        assert [p.is_exact for p in done.plan.placements if p.is_chunk] == plan_for
        return done.report

    head = head_of(twice)
    twice.encode(CHUNKS, head, context=twice.primer)
    before = report([False, False, False])
    twice.encode(CHUNKS, head, context=twice.contexts(head))
    assert report([True, False, False]).charged_recompute < before.charged_recompute


@pytest.mark.parametrize("contexts", [(PRIMER, None), (PRIMER,), (None,)])
def test_missed_chunks_are_encoded_as_those_beside_them_were(once, contexts):
    engine = once
    engine.encode([], head_of(engine), context=contexts)
    engine.register(CHUNKS)
    assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_missed == 3
    engine.write_back.drain()
    (ids,) = {behind.prefix_ids for behind in engine.library.encoded_after()}
    for context in (PRIMER, None):
        behind = EncodedAfter(ids, context.name if context else "")
        held = [engine.library.shelf.holds(behind, ids_of(engine, chunk)) for chunk in CHUNKS]
        assert held == [context in contexts] * 3


def test_behind_a_head_that_was_learned_as_well(twice):
    twice.register(CHUNKS)
    for first, second in ((0, 1), (1, 0), (0, 2), (2, 1)):
        prompt = ask(CHUNKS[first], CHUNKS[second])
        prompt[-1]["content"] += f" (Question {first}{second}.)"
        twice.generate(prompt, max_tokens=1)
        twice.write_back.drain()
    learned = max(twice.library.encoded_after(), key=lambda one: len(one.prefix_ids))
    assert len(learned.prefix_ids) > 5
    twice.forget(CHUNKS)
    twice.register(CHUNKS)
    twice.generate(ask(*CHUNKS), max_tokens=1)
    twice.write_back.drain()
    for context in (PRIMER.name, ""):
        one = EncodedAfter(learned.prefix_ids, context)
        assert all(twice.library.shelf.holds(one, ids_of(twice, chunk)) for chunk in CHUNKS)


def test_of_the_first_text_what_is_exact_is_read_ahead(twice, tmp_path):
    head = head_of(twice)
    twice.encode(CHUNKS, head, context=twice.contexts(head))
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as later:
        later.prefetch(CHUNKS[:2])
        (memory, _), deadline = later.library.shelf.store.tiers, time.monotonic() + 60
        while len(memory.held) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        lengths = {kv.token_ids: kv.start for kv in memory.held.values()}
        first, second = (ids_of(later, chunk) for chunk in CHUNKS[:2])
        prefix = len(later.library.encoded_after()[0].prefix_ids)
        assert lengths[first] == prefix < lengths[second]


def test_memory_that_is_too_small_for_what_is_encoded_is_said(caplog):
    model = tiny_model("llama")
    room = 2 * max(len(model.tokenizer(text)["input_ids"]) for text in CHUNKS)
    small = StoreConfig(memory_bytes=room * model.shapes.bytes_per_token)
    with Engine(model, small) as engine:
        engine.encode(CHUNKS, context=None)
        assert f"of {len(CHUNKS)} texts, which were dropped again" in caplog.text
    caplog.clear()
    with Engine(model, StoreConfig()) as engine:
        engine.encode(CHUNKS)
    assert caplog.text == ""


def test_texts_that_were_encoded_before_an_interruption_have_all_their_kv(engine, monkeypatch):
    def stop(_):
        if len(engine.library.encoded_after()) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cached_rag.library.encode.BATCH_TOKENS", 1)
    with pytest.raises(KeyboardInterrupt):
        engine.encode(CHUNKS, head_of(engine), progress=stop)
    records = engine._encoder.records_of(CHUNKS)
    held = [engine.library.present(one, records) for one in engine.library.encoded_after()]
    assert [len(one) for one in held] == [1, 1]
    assert held[0] == held[1]
