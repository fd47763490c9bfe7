"""What fails for one answer fails no other; what fails for all leaves the engine able to answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from crowd import GREEDY, alone, begun
from doubles import Ends, Recording

from cached_rag import BatchConfig, Engine
from cached_rag.errors import ContextOverflowError

GUILTY = 3
ASKED = [f"{chunk} And why is number {n} so?" for n, chunk in enumerate([*CHUNKS, *CHUNKS])]
ASKED[GUILTY] = f"{CHUNKS[1]} {CHUNKS[2]} {ASKED[GUILTY]}"  # longer than the others get
ERRORS = [MemoryError("row"), torch.OutOfMemoryError("row"), RuntimeError("row")]


@pytest.fixture
def model():
    return Recording(tiny_model("llama"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["prompt", "answer"])
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])
def test_step_that_fails_for_one_row_leaves_the_others_their_answers(family, when, error):
    model = Recording(tiny_model(family))
    engine = Engine(model, NEW_PROMPTS, BatchConfig(prefill_tokens=40))
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]
    *others, length = sorted(engine.count_tokens(prompt) for prompt in ASKED)
    limit = others[-1] + GREEDY["max_tokens"] if when == "prompt" else length + 3
    assert limit < length + GREEDY["max_tokens"]
    model.fails = lambda batch: error if any(row.end > limit for row in batch) else None
    for n, stream in enumerate(begun(engine, ASKED, **GREEDY)):
        if n == GUILTY:
            with pytest.raises(type(error), match="row"):
                stream.result()
        else:
            assert stream.result().token_ids == expected[n]
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0


def test_step_that_is_too_much_for_all_together_is_done_in_parts(model):
    engine = Engine(model, NEW_PROMPTS)
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]
    model.fails = lambda batch: MemoryError() if len(batch) > 2 else None
    assert [a.token_ids for a in engine.generate_batch(ASKED, **GREEDY)] == expected


def test_step_that_is_interrupted_is_no_rows_fault(model):
    engine = Engine(model, NEW_PROMPTS)
    model.fails = lambda _: KeyboardInterrupt()
    streams = begun(engine, ASKED[:3], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        streams[0].result()


def test_step_that_fails_for_every_row_fails_all_and_no_later_ones(model):
    engine = Engine(model, NEW_PROMPTS)
    streams = begun(engine, ASKED[:3], **GREEDY)
    for stream in streams:
        next(stream)
    model.fails = lambda _: RuntimeError("out of memory")
    for stream in streams:
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
    assert engine.scheduler.nbytes == 0
    model.fails = lambda _: None
    assert engine.generate(ASKED[0], **GREEDY).finish_reason == "length"


def test_prompt_that_does_not_fit_fails_alone():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    prompts = [ASKED[0], "word " * 2000, ASKED[1]]
    first, bad, last = begun(engine, prompts, **GREEDY)
    assert first.result().token_ids
    with pytest.raises(ContextOverflowError):
        bad.result()
    assert list(bad) == []
    assert last.result().token_ids == alone("llama", prompts[2:], **GREEDY)[0]
    with pytest.raises(ContextOverflowError):
        engine.generate_batch(prompts, **GREEDY)
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0
    assert engine.generate(ASKED[0], **GREEDY).token_ids == first.result().token_ids


def test_memory_that_lacks_when_an_answer_is_over_fails_nobody(monkeypatch):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]
    failed = []

    def failing(*_):
        failed.append(True)
        raise MemoryError

    monkeypatch.setattr(engine.sequences, "add", failing)
    assert [a.token_ids for a in engine.generate_batch(ASKED, **GREEDY)] == expected
    assert failed
    assert engine.scheduler.num_running == 0


class Panic(BaseException):
    """As libraries in Rust raise them."""


def test_turn_that_breaks_fails_all_and_the_next_request_is_served(model):
    engine = Engine(model, NEW_PROMPTS)
    model.fails = lambda _: Panic()  # no Exception: nothing in a turn handles it

    async def ask():
        done = [engine.stream(prompt, **GREEDY).atext() for prompt in ASKED[:3]]
        return await asyncio.gather(*done, return_exceptions=True)

    assert all(isinstance(error, Panic) for error in asyncio.run(ask()))
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0
    model.fails = lambda _: None
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(lambda: engine.generate(ASKED[0], **GREEDY)).result()
    assert again.token_ids == alone("llama", ASKED[:1], **GREEDY)[0]


def raising(error, count):
    """For `Ends`: the answer that has the next token but so many fails with it, while it has it."""
    left = [None] * (count - 1) + [error]

    def asked():
        if left and (found := left.pop(0)):
            raise found

    return asked


def test_next_token_that_is_interrupted_ends_whose_tokens_were_not_taken(model):
    model.eos_ids = Ends(model.eos_ids)
    engine = Engine(model, NEW_PROMPTS)
    streams = begun(engine, ASKED[:3], **GREEDY)
    for stream in streams:
        next(stream)
    model.eos_ids.asked = raising(KeyboardInterrupt(), 2)
    with pytest.raises(KeyboardInterrupt):
        engine.scheduler.turn()
    assert [stream.finish_reason for stream in streams[1:]] == ["error", "error"]
    "".join(streams[0])
    assert tuple(streams[0].token_ids) == alone("llama", ASKED[:1], **GREEDY)[0]
    for stream in streams[1:]:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert engine.scheduler.nbytes == 0


def test_next_token_that_cannot_be_had_fails_its_answer_alone(model):
    model.eos_ids = Ends(model.eos_ids)
    engine = Engine(model, NEW_PROMPTS)
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED[:3]]
    streams = begun(engine, ASKED[:3], **GREEDY)
    for stream in streams:
        next(stream)
    model.eos_ids.asked = raising(RuntimeError("no token"), 1)
    with pytest.raises(RuntimeError, match="no token"):
        streams[0].result()
    assert [stream.result().token_ids for stream in streams[1:]] == expected[1:]
    assert engine.scheduler.num_running == 0
