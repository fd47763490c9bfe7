"""Answers made at the same time: each as if alone, and in fewer passes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CHUNKS, FAMILIES, UNMOVABLE, random_ids, tiny_model

from cached_rag import ContextOverflowError, Engine, LanguageModel, StoreConfig
from cached_rag.backends.base import StepInput
from cached_rag.backends.thread import ModelThread
from cached_rag.engine.decoding import Answering
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

STEP = LanguageModel.step

PROMPTS = [f"{chunk}\n\nWhat is said {word}?" for chunk in CHUNKS for word in ("here", "there")]


def filled(model, length, seed):
    ids = torch.tensor([random_ids(length, seed)])
    buffer = KVBuffer.like(model.shapes, length + 1)
    model.prefill(buffer, ids, num_logits=0)
    return buffer


def step(model, buffer, token, slot):
    """The slow twin: one more token of one row, as a prefill of that row."""
    ids = torch.zeros(1, slot + 1, dtype=torch.int64)
    ids[0, slot] = token
    return model.prefill(buffer, ids, torch.tensor([slot])).logits


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNMOVABLE))
def test_rows_of_a_batch_equal_rows_alone(family):
    model = tiny_model(family)
    lengths = (5, 40, 23)
    buffers = [filled(model, length, seed) for seed, length in enumerate(lengths)]
    rows = list(zip(buffers, range(7, 10), lengths, strict=True))
    alone = torch.cat([step(model, *row) for row in rows])
    written = [buffer.keys[:, :, :, slot].clone() for buffer, _, slot in rows]
    for buffer, _, slot in rows:
        buffer.keys[:, :, :, slot] = 0
    together = STEP(model, [StepInput(RowKV(b, slot), [token]) for b, token, slot in rows])
    assert torch.allclose(together, alone, atol=1e-4)
    for (buffer, _, slot), keys in zip(rows, written, strict=True):
        assert torch.allclose(buffer.keys[:, :, :, slot], keys, atol=1e-4)
    assert not torch.allclose(together[0], alone[1], atol=1e-2)


def test_most_families_can_batch():
    able = {family for family in FAMILIES if tiny_model(family).can_batch}
    assert {"llama", "qwen3", "gemma3", "mistral"} <= able
    assert "bloom" not in able
    assert "longrope" not in able


@pytest.fixture
def passes(monkeypatch):
    """How many rows each decoding pass had."""
    sizes = []

    def recording(model, steps):
        sizes.append(len(steps))
        return STEP(model, steps)

    monkeypatch.setattr(LanguageModel, "step", recording)
    return sizes


def test_a_batch_answers_as_one_by_one_in_fewer_passes(engine, passes):
    engine.encode(CHUNKS)
    options = {"max_tokens": 12, "stop": ("zzz",)}
    alone = [engine.generate(prompt, **options) for prompt in PROMPTS]
    assert set(passes) == {1}
    count = len(passes)
    passes.clear()
    together = engine.generate_batch(PROMPTS, **options)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert sum(passes) == count
    assert max(passes) > 2
    assert len(passes) < count / 2


def test_a_seed_samples_the_same_in_a_batch(engine):
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    alone = [engine.generate(prompt, **options).text for prompt in PROMPTS]
    assert [a.text for a in engine.generate_batch(PROMPTS, **options)] == alone
    other = engine.generate_batch(PROMPTS, **options | {"seed": 4})
    assert [a.text for a in other] != alone


def test_one_bad_prompt_is_named_and_the_engine_goes_on(engine):
    with pytest.raises(ContextOverflowError):
        engine.generate_batch([PROMPTS[0], "word " * 2000], max_tokens=4)
    assert engine.generate(PROMPTS[0], max_tokens=4).text


def test_a_consumer_that_pauses_holds_nobody_up(engine):
    paused = engine.stream(PROMPTS[0], max_tokens=6)
    first = next(paused)
    with ThreadPoolExecutor(2) as pool:
        options = {"max_tokens": 6}
        done = list(pool.map(lambda p: engine.generate(p, **options).text, PROMPTS[1:3]))
    assert done == [engine.generate(p, max_tokens=6).text for p in PROMPTS[1:3]]
    assert first + "".join(paused) == engine.generate(PROMPTS[0], max_tokens=6).text


def test_an_error_in_one_rows_sampling_is_that_rows_alone(engine, monkeypatch):
    take = Answering.take

    def fail_once(answer, logits):
        if len(answer.token_ids) == 2 and not failed:
            failed.append(answer)
            raise RuntimeError("no token")
        return take(answer, logits)

    failed = []
    expected = [engine.generate(prompt, max_tokens=6).text for prompt in PROMPTS[:3]]
    monkeypatch.setattr(Answering, "take", fail_once)
    streams = [engine.stream(prompt, max_tokens=6) for prompt in PROMPTS[:3]]
    for stream in streams:
        stream.start()
    with pytest.raises(RuntimeError, match="no token"):
        streams[0].result()
    assert [stream.result().text for stream in streams[1:]] == expected[1:]
    assert engine.scheduler.num_running == 0


def test_a_cancelled_answer_ends_before_its_next_token(engine):
    stream = engine.stream(PROMPTS[0], max_tokens=50)
    next(stream)
    stream.cancel()
    assert len(list(stream)) <= 1
    assert stream.finish_reason == "cancelled"
    assert len(stream.token_ids) <= 2
    never = engine.stream(PROMPTS[0], max_tokens=50)
    never.cancel()
    assert list(never) == []
    assert never.report.prompt_tokens == 0


def test_a_dropped_stream_is_over_at_once(engine):
    stream = engine.stream(PROMPTS[0], max_tokens=50)
    next(stream)
    assert engine.scheduler.num_running == 1
    del stream  # no collector needed: nothing holds it
    assert engine.scheduler.num_running == 0
    stream = engine.stream(PROMPTS[0], max_tokens=50)
    next(stream)
    with engine.lock:  # somebody else's pass, in the midst of which the collector runs
        del stream
    assert engine.generate(PROMPTS[0], max_tokens=2).text


def test_a_closed_stream_says_so(engine):
    stream = engine.stream(PROMPTS[0], max_tokens=50)
    next(stream)
    stream.close()
    assert stream.finish_reason == "cancelled"
    assert stream.report.output_tokens == len(stream.token_ids) > 0


def test_all_threads_but_the_main_one_compute_in_one(engine):
    seen = set()
    thread = ModelThread()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: thread.run(lambda: seen.add(threading.get_ident())), range(8)))
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    assert thread.run(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()


def test_the_models_thread_ends_when_idle(monkeypatch):
    monkeypatch.setattr("cached_rag.backends.thread._IDLE_SECONDS", 0.01)
    thread = ModelThread()
    first = thread.submit(threading.current_thread).result()
    deadline = time.monotonic() + 5
    while first.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not first.is_alive()
    assert thread.submit(threading.current_thread).result() is not first


def test_the_models_thread_ends_before_the_interpreter():
    code = """
import threading, time, torch
from cached_rag.backends.thread import submit
matrix = torch.randn(600, 600)
def work():
    for _ in range(60):
        matrix @ matrix
submit(work)
submit(lambda: time.sleep(60))  # is never begun
time.sleep(0.05)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50)
        assert (done.returncode, done.stderr) == (0, b"")


def test_engines_are_shared_by_what_they_were_asked_for(monkeypatch):
    made = []

    def load(name, dtype=None, device=None):
        made.append(name)
        return tiny_model(name)

    monkeypatch.setattr("cached_rag.engine.engine.load_model", load)
    one = Engine.shared("llama")
    assert Engine.shared("llama") is one
    assert Engine.shared("llama", store=StoreConfig(namespace="b")) is not one
    assert Engine.shared("qwen3") is not one
    assert made == ["llama", "llama", "qwen3"]
    one.close()
    assert Engine.shared("llama") is not one
