"""Prompts are read where they are asked: under no lock, and at nobody else's expense."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, count_at_rest, tiny_model
from controls import TOKENIZER
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag import BatchConfig, Engine, Import, Schema, wrap_model
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.errors import BusyError, ContextOverflowError

PROMPT = f"{CHUNKS[0]} Why?"
GREEDY = {"max_tokens": 4}
LONG = "word " * 40_000


@functools.cache
def byte_model():
    """A tiny model whose tokenizer knows all bytes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    return wrap_model(model, TOKENIZER, name="bytes", revision="bytes")


@pytest.fixture
def read(monkeypatch):
    """Texts that were tokenised, each with its thread and whether a model's lock was held."""
    tokenize, found = Tokenization.tokenize, []

    def recording(tokenization, rendered):
        held = tiny_model("llama").lock.locked()
        found.append((rendered.text, threading.current_thread().name, held))
        return tokenize(tokenization, rendered)

    monkeypatch.setattr(Tokenization, "tokenize", recording)
    return found


@pytest.fixture
def gate(monkeypatch):
    """Holds up whoever reads a text that begins with "slow"; set it to let them go.

    Of no text it is known that it does not fit, before it is read.
    """
    tokenize, opened, held = Tokenization.tokenize, threading.Event(), []
    monkeypatch.setattr(Tokenization, "least_tokens", lambda *_: None)

    def waiting(tokenization, rendered):
        if rendered.text.startswith("slow"):
            held.append(rendered.text)
            assert opened.wait(60)
        return tokenize(tokenization, rendered)

    monkeypatch.setattr(Tokenization, "tokenize", waiting)
    yield opened, held
    opened.set()


def test_what_surely_does_not_fit_is_not_tokenised(read):
    engine = Engine(byte_model())
    schema = Schema.from_string("<schema name='s'><module name='m'>Be brief.</module></schema>")
    for prompt in ("a" * 100_000, [{"role": "user", "content": "a" * 100_000}]):
        with pytest.raises(ContextOverflowError, match="at least"):
            engine.generate(prompt, **GREEDY)
    with pytest.raises(ContextOverflowError, match="at least"):
        engine.generate(schema.prompt(Import("m"), "a" * 100_000), **GREEDY)
    with pytest.raises(ContextOverflowError, match="at least"):
        engine.encode(["a" * 100_000], context=None)
    assert not read
    assert engine.generate("a" * 240, **GREEDY).report.prompt_tokens == 240  # control: it fits


@pytest.mark.parametrize("how", ["here", "thread", "loop"])
def test_no_prompt_is_read_under_the_models_lock(read, how):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(CHUNKS, context=None)
    read.clear()
    if how == "here":
        engine.generate(PROMPT, **GREEDY)
    elif how == "thread":
        with ThreadPoolExecutor(1, "asker") as threads:
            threads.submit(lambda: engine.generate(PROMPT, **GREEDY)).result()
    else:
        asyncio.run(engine.stream(PROMPT, **GREEDY).atext())
    name = {"here": threading.current_thread().name, "thread": "asker_0", "loop": "read_"}[how]
    assert [(text, held) for text, _, held in read] == [(PROMPT, False)]
    assert read[0][1].startswith(name)


def test_no_text_is_read_under_the_models_lock_to_be_encoded(monkeypatch):
    model, literal, found = tiny_model("llama"), Tokenization.literal, []

    def recording(tokenization, text):
        found.append((text, threading.current_thread().name, model.lock.locked()))
        return literal(tokenization, text)

    monkeypatch.setattr(Tokenization, "literal", recording)
    with ThreadPoolExecutor(1, "asker") as threads:
        threads.submit(lambda: Engine(model).encode(CHUNKS, context=None)).result()
    assert found == [(chunk, "asker_0", False) for chunk in CHUNKS]


def test_a_prompt_that_takes_long_to_read_holds_nobody_up(gate):
    opened, held = gate
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    other = engine.tenant("other")

    async def ask():
        slow = [engine.stream(f"slow {n} {LONG}", tenant="a", **GREEDY) for n in range(4)]
        tasks = [asyncio.create_task(stream.atext()) for stream in slow]
        while not held:
            await asyncio.sleep(0.01)
        for asker, tenant in ((other, "b"), (engine, "a")):
            done = asker.stream(PROMPT, tenant=tenant, **GREEDY).atext()
            assert await asyncio.wait_for(done, 30) == expected
        assert engine.scheduler.num_waiting == 4
        opened.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    expected = engine.generate(PROMPT, **GREEDY).text
    assert all(isinstance(error, ContextOverflowError) for error in asyncio.run(ask()))
    assert engine.scheduler.num_waiting == 0


def test_nobody_reads_for_a_client_that_has_left(gate):
    opened, held = gate
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)

    async def ask():
        tasks = [
            asyncio.create_task(engine.stream(f"slow {n} {LONG}", **GREEDY).atext())
            for n in range(5)
        ]
        while not held:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        opened.set()
        assert await engine.stream(f"{PROMPT} {'x ' * 60_000}", **GREEDY).atext() == ""

    with pytest.raises(ContextOverflowError):
        asyncio.run(ask())  # it was behind the others
    assert len(held) == 1
    assert engine.scheduler.num_waiting == 0


def test_what_is_being_read_counts_as_waiting(gate):
    opened, held = gate
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(max_rows=1, max_waiting=2))

    async def ask():
        streams = [engine.stream(f"slow {n} why?", **GREEDY) for n in range(3)]
        tasks = [asyncio.create_task(stream.atext()) for stream in streams]
        while not held:
            await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await engine.stream(PROMPT, **GREEDY).atext()
        opened.set()
        return await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert count_at_rest(held) == 3


def test_what_cannot_be_read_fails_its_own_answer_alone(monkeypatch):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    tokenize = Tokenization.tokenize

    def failing(tokenization, rendered):
        if "bad" in rendered.text:
            raise MemoryError
        return tokenize(tokenization, rendered)

    monkeypatch.setattr(Tokenization, "tokenize", failing)
    streams = [engine.stream(text, **GREEDY) for text in (PROMPT, "bad", PROMPT)]
    for stream in streams:
        stream.start()
    assert streams[0].result().text == streams[2].result().text
    with pytest.raises(MemoryError):
        streams[1].result()
    assert streams[1].finish_reason == "error"
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0
