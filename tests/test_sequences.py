"""Runs of modules seen before, and modules missed: what a request computed serves the next one."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from conftest import CHUNKS, plain_logits, tiny_model
from test_engine import ask

from cached_rag import Engine, StoreConfig
from cached_rag.library.background import Activity, WriteBack
from cached_rag.library.sequences import SequenceTree


@pytest.fixture
def engine():
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 24)) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]))
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


def test_it_is_bounded_and_a_node_without_its_parent_is_not_found(engine):
    done = engine.prefill(ask(*CHUNKS), method="prefix", max_tokens=4)
    node = done.buffer.read(0, 20, tuple(done.tokens.ids[:20])).nbytes
    tree, ids = SequenceTree(2 * node), done.tokens.ids
    tree.add("k", ids, [20, 40, 60], ["a", "b", "c"], done.buffer)
    assert tree.nbytes <= 2 * node
    assert tree.find("k", ids, [20, 40, 60]) == []  # the first node was the oldest
    assert tree.order(["a", "b"]) == [0, 1]
    nothing = SequenceTree(0)
    nothing.add("k", ids, [20], ["a"], done.buffer)
    assert nothing.find("k", ids, [20]) == []
    done.release()


def test_order_follows_the_longest_known_path(engine):
    done = engine.prefill(ask(*CHUNKS), method="prefix", max_tokens=4)
    tree, ids = SequenceTree(1 << 24), done.tokens.ids
    tree.add("k", ids, [20, 40, 60], ["a", "b", "c"], done.buffer)
    tree.add("k", ids, [20, 45], ["a", "d"], done.buffer)
    assert [["x", "c", "b", "a"][i] for i in tree.order(["x", "c", "b", "a"])] == [
        "a",
        "b",
        "c",
        "x",
    ]
    assert [["d", "b", "a"][i] for i in tree.order(["d", "b", "a"])] == ["a", "d", "b"]
    assert tree.order(["b", "c"]) == [0, 1]
    # A path may begin with the first name, and go on with it.
    assert [["a", "c", "b"][i] for i in tree.order(["a", "c", "b"])] == ["a", "b", "c"]
    assert [["a", "x", "d"][i] for i in tree.order(["a", "x", "d"])] == ["a", "d", "x"]
    done.release()


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
    assert not any(library.holds(behind, gone.token_ids) for behind in library.behinds())
    kept = library.table.get(CHUNKS[1])
    assert any(library.holds(behind, kept.token_ids) for behind in library.behinds())


def test_what_was_missed_is_there_the_next_time(engine):
    ids = [tuple(engine.tokenization.literal(chunk).ids) for chunk in CHUNKS]
    (behind,) = engine.library.behinds()
    whole = {i: engine.library.fetch(behind, i) for i in ids}
    for i in ids[1:]:
        engine.library.store.delete(engine.library.key(behind, i))
    first = prefill(engine, *CHUNKS[::-1], method="reuse")
    assert (first.report.modules_hit, first.report.modules_missed) == (1, 2)
    engine.write_back.drain()
    second = prefill(engine, *CHUNKS[::-1], method="reuse")
    assert (second.report.modules_hit, second.report.modules_missed) == (3, 0)
    for i in ids:  # twin: what encoding gave in the first place
        assert torch.allclose(engine.library.fetch(behind, i).keys, whole[i].keys, atol=1e-4)


def test_write_back_waits_for_requests_and_drops_what_is_too_much():
    activity, done = Activity(), []
    work = WriteBack(activity, capacity=2)
    end = activity.begin()
    for name in "aabcdef":
        work.offer(name, lambda name=name: done.append(name))
    time.sleep(0.05)
    assert not done  # a request is under way
    assert work.dropped >= 3
    end()
    end()  # twice does no harm
    work.drain()
    assert done[:2] == ["a", "b"]
    work.offer("bad", lambda: 1 / 0)
    work.offer("good", lambda: done.append("good"))
    work.drain()
    assert done[-1] == "good"  # a task that fails does not end the thread
    work.close()


def test_closing_does_not_wait_for_requests():
    activity, done = Activity(), []
    work = WriteBack(activity)
    activity.begin()
    work.offer("a", lambda: done.append("a"))
    closer = threading.Thread(target=work.close)
    closer.start()
    closer.join(timeout=10)
    assert not closer.is_alive()
    assert not done
