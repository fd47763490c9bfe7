"""Answers take memory as they grow; under a bound the youngest waits again, and goes on later."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from crowd import ASKED, begun
from doubles import Recording

from cached_rag import BatchConfig, Engine, StoreConfig
from cached_rag.engine import batch, prompt, request, sharing
from cached_rag.engine.prompt import PAGE
from cached_rag.kv.buffer import KVBuffer

PROMPTS = [*ASKED[:2], f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWhy?", f"{CHUNKS[1]}\n\nWho?"]
LONG = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def model():
    return Recording(tiny_model("llama"))


def set_page(monkeypatch, size):
    """Have answers take memory in pages of so many tokens."""
    for module in (prompt, request):
        monkeypatch.setattr(module, "PAGE", size)


def reserved(model, **batch):
    """Bytes in use at every step, of an engine that is asked next."""
    engine, used = Engine(model, NEW_PROMPTS, BatchConfig(**batch)), []
    model.before = lambda _: used.append(engine.scheduler.nbytes)
    return engine, used


@pytest.mark.parametrize("method", ["full", "auto", "reuse"])
@pytest.mark.parametrize(("drafts", "how"), [(False, {"temperature": 2.0, "seed": 3}), (True, {})])
def test_an_answer_in_many_pages_is_the_same(model, pages, monkeypatch, method, drafts, how):
    options = LONG | how | {"method": method, "drafts": drafts}
    answers = []
    for page in (4, 1000):
        set_page(monkeypatch, page)
        engine = Engine(model, NEW_PROMPTS)
        engine.encode(CHUNKS, context=None)
        answers.append([one.token_ids for one in engine.generate_batch(PROMPTS, **options)])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [60] * len(PROMPTS)


def test_memory_grows_with_the_answer(model, pages):
    engine, used = reserved(model)
    engine.generate("Why?", max_tokens=600, ignore_eos=True, drafts=False)
    assert used == sorted(used)
    sizes = [nbytes // model.shapes.bytes_per_token for nbytes in dict.fromkeys(used)]
    assert sizes[0] == 256  # then one page after the other, each as large as the answer before it
    assert all(1.9 * one < other + 8 for one, other in pairwise(sizes[:-1]))
    assert 600 < sizes[-1] < 620
    assert engine.scheduler.nbytes == 0


def test_most_answers_have_one_page(model):
    engine, used = reserved(model)
    engine.generate(CHUNKS[0], max_tokens=PAGE, ignore_eos=True)
    assert len(set(used)) == 1


@pytest.mark.parametrize(
    ("method", "slots", "how"),
    [("full", 600, {}), ("auto", 2 * 256 + 6, {"temperature": 2.0, "seed": 3})],
)
def test_the_youngest_gives_way_and_goes_on_where_it_was(model, pages, method, slots, how):
    options = how | {"method": method, "max_tokens": 240, "ignore_eos": True}
    asked = [f"{CHUNKS[n]} Why?" for n in range(3)]
    free = Engine(model, NEW_PROMPTS)
    free.encode(CHUNKS, context=None)
    expected = [answer.token_ids for answer in free.generate_batch(asked, **options)]
    room = slots * model.shapes.bytes_per_token
    engine, used = reserved(model, max_bytes=room, shares=False)
    engine.encode(CHUNKS, context=None)
    model.steps.clear()
    answers = engine.generate_batch(asked, **options)
    assert [answer.token_ids for answer in answers] == expected
    told = [any("interrupted" in note for note in one.report.notes) for one in answers]
    assert not told[0]  # the oldest gets what it needs
    assert any(told)
    assert [one.report.output_tokens for one in answers] == [240] * 3
    assert max(used) <= room
    assert engine.scheduler.nbytes == 0
    assert max(len(rows) for rows in model.steps) > 1


@pytest.mark.parametrize("asked", [["Why?", "Who is it?"], ["Why?"]])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_page_that_cannot_be_had_fails_no_answer(model, pages, asked, error, monkeypatch):
    options = LONG | {"method": "full", "max_tokens": 300}
    expected = [Engine(model, NEW_PROMPTS).generate(one, **options).token_ids for one in asked]
    left = [error("none left")]

    def like(*given):
        if left:
            raise left.pop()
        return KVBuffer.like(*given)

    monkeypatch.setattr(batch, "KVBuffer", SimpleNamespace(like=like))
    answers = Engine(model, NEW_PROMPTS).generate_batch(asked, **options)
    assert [one.token_ids for one in answers] == expected
    told = [any("no memory was left" in note for note in one.report.notes) for one in answers]
    assert told == [False] * (len(asked) - 1) + [True]  # the youngest


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_models_with_windows_go_on_where_they_were(pages, family):
    model, options = tiny_model(family), {**LONG, "max_tokens": 240, "method": "full"}
    asked = [f"{chunk} Why?" for chunk in CHUNKS[:2]]
    free = Engine(model, NEW_PROMPTS)
    expected = [one.token_ids for one in free.generate_batch(asked, **options)]
    bound = BatchConfig(max_bytes=(2 * 256 + 6) * model.shapes.bytes_per_token)
    answers = Engine(model, NEW_PROMPTS, bound).generate_batch(asked, **options)
    assert [one.token_ids for one in answers] == expected
    assert any("interrupted" in note for note in answers[1].report.notes)


def test_kv_that_others_read_stays_when_a_long_answer_ends(model, pages, monkeypatch):
    monkeypatch.setattr(sharing, "MIN_SHARED", 16)
    beginning = " ".join([*CHUNKS, *CHUNKS])
    engine, other = Engine(model, NEW_PROMPTS), " ".join([CHUNKS[2]] * 6)
    engine.encode([other], context=None)
    expected = engine.generate(f"{beginning} Who?", **LONG, method="full").token_ids
    first = engine.stream(f"{beginning} Why?", max_tokens=400, ignore_eos=True, method="full")
    while len(first.token_ids) < 300:  # its KV lies in several buffers by now
        next(first)
    second = engine.stream(f"{beginning} Who?", **LONG, method="full")
    next(second)
    assert second.report.shared_kv_bytes > 0
    first.close()
    # A prompt with a chunk takes the buffer that is free.
    assert engine.generate(f"So: {other} Why?", **LONG, method="reuse").report.modules_hit == 1
    assert second.result().token_ids == expected


@pytest.mark.parametrize("drafts", [False, True])
def test_those_that_share_chunks_can_give_way(model, pages, drafts):
    options = {"method": "reuse", "max_tokens": 240, "ignore_eos": True, "drafts": drafts}
    asked = [f"{' '.join([CHUNKS[1]] * 9)}\n\nWhy {n}?" for n in range(3)]
    free = Engine(model, NEW_PROMPTS)
    free.encode([" ".join([CHUNKS[1]] * 9)], context=None)
    expected = [answer.token_ids for answer in free.generate_batch(asked, **options)]
    engine, used = reserved(model, max_bytes=900 * model.shapes.bytes_per_token)
    engine.encode([" ".join([CHUNKS[1]] * 9)], context=None)
    answers = engine.generate_batch(asked, **options)
    assert [answer.token_ids for answer in answers] == expected
    assert any("interrupted" in note for one in answers for note in one.report.notes)
    assert max(used) <= 900 * model.shapes.bytes_per_token


def test_a_request_that_gave_way_can_be_cancelled(model, pages):
    room = (2 * 256 + 20) * model.shapes.bytes_per_token
    engine, _ = reserved(model, max_bytes=room, shares=False)
    streams = begun(engine, CHUNKS[:2], max_tokens=400, ignore_eos=True, method="full")
    while not streams[1].report.notes:
        next(streams[0])
    assert engine.scheduler.num_waiting == 1
    streams[1].close()
    assert streams[1].finish_reason == "cancelled"
    assert len(streams[0].result().token_ids) == 400


def test_what_is_deleted_while_a_request_waits_again_is_not_kept(model, pages):
    texts = [" ".join([chunk] * 8) for chunk in CHUNKS[:2]]
    for deletes in (False, True):
        room = 700 * model.shapes.bytes_per_token
        engine = Engine(model, None, BatchConfig(max_bytes=room, shares=False))
        streams = begun(engine, texts, max_tokens=400, ignore_eos=True, method="full")
        while not streams[1].report.notes:
            next(streams[0])
        if deletes:  # a text that was not known yet when the prompt was read
            engine.encode([texts[1]], context=None)
            assert engine.forget([texts[1]]) == 1
        for stream in streams:
            stream.result()
        kept = engine.generate(texts[1], max_tokens=1, method="full").report.kept_tokens
        assert (kept == 0) == deletes


def test_a_report_of_an_answer_that_was_set_back_counts_each_token_once(model, pages, monkeypatch):
    set_page(monkeypatch, 4)
    text = " ".join(CHUNKS)
    prompt = f"Intro.\n\n{text}\n\n{CHUNKS[1]}\n\nWho?"
    options = {"max_tokens": 300, "ignore_eos": True, "method": "cacheblend", "drafts": False}
    slots = Engine(model, NEW_PROMPTS).count_tokens(prompt) * 6
    bound = BatchConfig(max_bytes=slots * model.shapes.bytes_per_token, shares=False)
    with Engine(model, StoreConfig(write_back=False), bound) as engine:
        engine.encode([text, CHUNKS[1]])
        reports = [one.report for one in engine.generate_batch([prompt] * 2, **options)]
    assert any("interrupted" in note for report in reports for note in report.notes)
    for report in reports:
        assert report.cached_tokens + report.recomputed_tokens <= report.prompt_tokens
