"""Runs of modules seen before, and modules missed: what a request computed serves the next one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from conftest import CHUNKS, ask, plain_logits, tiny_model
from crowd import begun

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.rows import RowKV
from cached_rag.library.learning import Activity, WriteBack
from cached_rag.library.sequences import PromptKV, Sequences, where


@pytest.fixture
def engine():
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 24)) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
        yield engine


def prefill(engine, *chunks, method="prefix", **options):
    done = engine.prefill(ask(*chunks), method=method, max_tokens=4, **options)
    done.release()
    return done


def test_a_sequence_seen_before_is_lossless_where_it_was_computed_in_full(engine):
    first = prefill(engine, *CHUNKS)
    again = prefill(engine, *CHUNKS)
    plain = plain_logits(engine.model, first.tokens.ids)[-1]
    assert torch.allclose(again.logits[0], plain, atol=1e-4)
    assert again.report.charged_recompute < first.report.charged_recompute
    branch = prefill(engine, CHUNKS[0], CHUNKS[1])
    assert torch.allclose(
        branch.logits, prefill(engine, CHUNKS[0], CHUNKS[1], method="full").logits, atol=1e-4
    )
    assert branch.report.cached_tokens > again.report.cached_tokens / 2


def test_every_method_takes_exact_sequences_and_none_takes_anothers_repaired_ones(engine):
    reuse = prefill(engine, *CHUNKS, method="reuse")
    epic = prefill(engine, *CHUNKS, method="epic:anchor_tokens=8")
    assert not torch.allclose(reuse.logits, epic.logits, atol=1e-3)
    again = prefill(engine, *CHUNKS, method="epic:anchor_tokens=8")
    assert torch.allclose(again.logits, epic.logits, atol=1e-4)
    assert again.report.charged_recompute < epic.report.charged_recompute
    other = prefill(engine, *CHUNKS, method="epic:anchor_tokens=4")
    assert other.report.charged_recompute > again.report.charged_recompute
    exact = prefill(engine, *CHUNKS, method="cacheblend", recompute_ratio=1.0)
    after = prefill(engine, *CHUNKS, method="reuse")
    assert torch.allclose(after.logits, exact.logits, atol=1e-4)


def test_another_order_or_another_beginning_is_another_sequence(engine):
    prefill(engine, *CHUNKS)
    turned = prefill(engine, CHUNKS[1], CHUNKS[0], CHUNKS[2])
    plain = plain_logits(engine.model, turned.tokens.ids)[-1]
    assert torch.allclose(turned.logits[0], plain, atol=1e-4)
    other = engine.prefill(ask(*CHUNKS, system="Be rude."), method="prefix", max_tokens=4)
    assert torch.allclose(
        other.logits[0], plain_logits(engine.model, other.tokens.ids)[-1], atol=1e-4
    )
    other.release()


def test_sequences_are_bounded_and_the_longest_unused_goes_first(engine):
    prefill(engine, *CHUNKS)
    room = engine.sequences.nbytes + 1000
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=room)) as small:
        small.encode(CHUNKS, prefix=small.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
        prefill(small, *CHUNKS)
        again = prefill(small, *CHUNKS)
        prefill(small, *CHUNKS[::-1])
        assert 0 < small.sequences.nbytes <= room
        assert prefill(small, *CHUNKS).report.cached_tokens < again.report.cached_tokens
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=0)) as none:
        none.encode(CHUNKS, context=None)
        prefill(none, *CHUNKS)
        assert none.sequences.nbytes == 0


def test_sequences_that_begin_alike_keep_their_beginning_once(engine):
    prefill(engine, *CHUNKS[:2])
    two = engine.sequences.nbytes
    prefill(engine, *CHUNKS)
    three = engine.sequences.nbytes
    prefill(engine, CHUNKS[0], CHUNKS[2])
    assert engine.sequences.nbytes - three < two  # the first chunk was there
    prefill(engine, *CHUNKS)
    again = engine.sequences.nbytes
    prefill(engine, *CHUNKS)
    assert engine.sequences.nbytes == again


def test_sequences_are_exact_only_where_all_they_were_made_of_was(engine):
    more = "Tin cans keep soup for years, as sailors found when the salted meat was gone."
    engine.encode([more], prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    prefill(engine, *CHUNKS, method="epic")
    prefill(engine, *CHUNKS[:2], method="cacheblend", recompute_ratio=1.0)
    prefill(engine, *CHUNKS, method="epic")  # of the two the repaired one is now the newer
    prefill(engine, *CHUNKS[:2], more, method="epic")  # and this begins with the exact one,
    prefill(engine, *CHUNKS[:2], method="cacheblend", recompute_ratio=1.0)  # newer again now
    after = prefill(engine, *CHUNKS[:2], more)
    assert after.report.cached_tokens > 0
    assert torch.allclose(
        after.logits[0], plain_logits(engine.model, after.tokens.ids)[-1], atol=1e-4
    )


def test_sequences_too_long_for_the_bound_drive_nothing_out(engine):
    prefill(engine, *CHUNKS[:1])
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=engine.sequences.nbytes)) as small:
        small.encode(CHUNKS, prefix=small.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
        prefill(small, *CHUNKS[:1])
        held = small.sequences.nbytes
        prefill(small, *CHUNKS[::-1])
        assert small.sequences.nbytes == held > 0


def test_order_follows_the_longest_known_sequence(engine):
    def order(*given):
        names = [digest(CHUNKS[index]) for index in given]
        return [given[index] for index in engine.sequences.order("", names)]

    assert order(2, 1, 0) == [2, 1, 0]
    prefill(engine, CHUNKS[0], CHUNKS[1])
    assert order(2, 1, 0) == [0, 1, 2]
    assert order(2, 1) == [2, 1]
    prefill(engine, CHUNKS[0], CHUNKS[2])
    assert order(2, 1, 0) == [0, 2, 1]  # both go on; the one that was named first is taken
    assert order(1, 2, 0) == [0, 1, 2]
    engine.forget(CHUNKS[:1])
    assert order(2, 1, 0) == [2, 1, 0]


@pytest.mark.parametrize("running", [False, True])
def test_short_texts_are_forgotten_though_their_borders_merged(engine, running):
    text = "the keeper lit the lamp the keeper"
    ids = tuple(engine.tokenization.literal(text).ids)
    asked = f"So {text}, {CHUNKS[0]} {CHUNKS[1]}"
    engine.register([text] if running else [])
    first = engine.stream(f"{asked} Why?", max_tokens=40, ignore_eos=True, method="full")
    for _ in first:
        if running:
            break
    assert len(ids) <= 8
    assert not where(np.asarray(engine.tokenization.literal(asked).ids), np.asarray(ids))
    if not running:
        assert engine.generate(f"{asked} Who?", max_tokens=1, method="full").report.kept_tokens
        engine.encode([text], context=None)
    engine.forget([text])
    after = engine.generate(f"{asked} Who?", max_tokens=1, method="full").report
    assert after.kept_tokens < 8
    first.close()


@pytest.mark.parametrize("method", ["full", "auto"])
def test_a_prompt_with_a_text_whose_tokens_differ_there_leaves_nothing(engine, method, monkeypatch):
    """As digits behind digits may: nobody could tell where its KV is, to forget it."""
    asked = " ".join([*CHUNKS * 4, "Why?"])  # long enough to be kept
    engine.register(CHUNKS[:1])
    monkeypatch.setattr("cached_rag.engine.planner.align", lambda *_: None)
    for _ in range(2):
        found = engine.generate(asked, max_tokens=1, method=method)
        assert found.report.kept_tokens == 0
    running = begun(engine, [asked, asked], max_tokens=4, method=method, ignore_eos=True)
    assert [stream.result().report.kept_tokens for stream in running] == [0, 0]


def test_a_single_text_is_refused_and_an_odd_one_costs_the_others_nothing(engine):
    for ask_for in (engine.forget, engine.register, engine.encode):
        with pytest.raises(ConfigError, match=r"\[text\]"):
            ask_for(CHUNKS[0])
    odd = "half of a pair, \ud83d, stands in this text, which is long enough"
    assert engine.forget([odd, CHUNKS[0]]) > 0
    assert engine.library.table.get(CHUNKS[0]) is None


def test_what_was_forgotten_meanwhile_does_not_come_back(engine):
    engine.register(CHUNKS)
    gone = engine.library.table.get(CHUNKS[0])
    stream = engine.stream("\n\n".join([*CHUNKS, "Why?"]), max_tokens=4)
    next(stream)
    engine.forget(CHUNKS[:1])  # the answer that missed it is still under way
    "".join(stream)
    engine.write_back.drain()
    library = engine.library
    assert library.table.get(CHUNKS[0]) is None
    assert all(library.table.get(chunk) for chunk in CHUNKS[1:])
    assert not any(
        library.shelf.holds(behind, gone.token_ids) for behind in library.encoded_after()
    )
    kept = library.table.get(CHUNKS[1])
    assert any(library.shelf.holds(behind, kept.token_ids) for behind in library.encoded_after())


def test_what_was_missed_is_there_the_next_time(engine):
    ids = [tuple(engine.tokenization.literal(chunk).ids) for chunk in CHUNKS]
    (behind,) = engine.library.encoded_after()
    whole = {i: engine.library.shelf.fetch(behind, i) for i in ids}
    for i in ids[1:]:
        engine.library.shelf.store.delete(engine.library.shelf.key(behind, i))
    first = prefill(engine, *CHUNKS[::-1], method="reuse")
    assert (first.report.modules_hit, first.report.modules_missed) == (1, 2)
    engine.write_back.drain()
    second = prefill(engine, *CHUNKS[::-1], method="reuse")
    assert (second.report.modules_hit, second.report.modules_missed) == (3, 0)
    for i in ids:  # twin: what encoding gave in the first place
        assert torch.allclose(engine.library.shelf.fetch(behind, i).keys, whole[i].keys, atol=1e-4)


@pytest.mark.parametrize(("filled", "kept"), [(300, 300), (250, 200)])
def test_of_a_prompt_that_was_cut_short_only_what_is_exact_is_kept(filled, kept):
    shapes = tiny_model("llama").shapes
    sequences = Sequences(1 << 24, keeps_repaired="conversation")
    cut = PromptKV("", np.arange(filled), (), exact_length=200, repair="a method", least=296)
    sequences.add(cut, RowKV(KVBuffer.like(shapes, 400), filled))
    assert sequences.nbytes == kept * shapes.bytes_per_token


def test_write_back_waits_for_requests_and_drops_what_is_too_much():
    activity, done = Activity(), []
    work = WriteBack(activity, capacity=2)
    asked = threading.Event()
    activity.begin(asked)
    for name in "aabcdef":
        work.offer(name, lambda name=name: done.append(name))
    time.sleep(0.05)
    assert not done  # a request is under way
    activity.end(asked)
    activity.end(asked)  # twice does no harm
    work.drain()
    assert done == ["a", "b"]
    work.offer("bad", lambda: 1 / 0)
    work.offer("good", lambda: done.append("good"))
    work.drain()
    assert done[-1] == "good"  # a task that fails does not end the thread
    work.close()


def test_what_is_begun_is_finished_before_the_next_is_begun():
    done, work = [], WriteBack(Activity())

    def piece(name, left):
        done.append(name)
        if left:
            work.offer((name, left), lambda: piece(name, left - 1), is_begun=True)

    asked = threading.Event()
    work._activity.begin(asked)
    for name in "abc":
        work.offer(name, lambda name=name: piece(name, 2))
    work._activity.end(asked)
    work.drain()
    work.close()
    assert "".join(done) == "aaabbbccc"


def test_closing_does_not_wait_for_requests():
    activity, done = Activity(), []
    work = WriteBack(activity)
    activity.begin(work)
    work.offer("a", lambda: done.append("a"))
    closer = threading.Thread(target=work.close)
    closer.start()
    closer.join(timeout=10)
    assert not closer.is_alive()
    assert not done
