"""One answer's stream: taken in one way, dropped, cancelled, closed, on whichever thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import CHUNKS, NEW_PROMPTS, count_at_rest, tiny_model
from controls import made
from crowd import ASKED, GREEDY, alone
from doubles import Recording
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from cached_rag import BatchConfig, Engine
from cached_rag.engine.decoding import Detokenizer
from cached_rag.errors import BusyError

PROMPTS = [f"{chunk}\n\nWhat is said here?" for chunk in CHUNKS]


def test_stream_that_is_not_read_on_holds_nobody_up(engine):
    paused = engine.stream(PROMPTS[0], max_tokens=6)
    first = next(paused)
    with ThreadPoolExecutor(2) as pool:
        options = {"max_tokens": 6}
        done = list(pool.map(lambda p: engine.generate(p, **options).text, PROMPTS[1:3]))
    assert done == [engine.generate(p, max_tokens=6).text for p in PROMPTS[1:3]]
    assert first + "".join(paused) == engine.generate(PROMPTS[0], max_tokens=6).text


def test_stream_that_is_cancelled_ends_before_its_next_token(engine):
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


def test_stream_that_is_dropped_is_over_at_once(engine):
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


def test_stream_that_is_closed_says_so(engine):
    stream = engine.stream(PROMPTS[0], max_tokens=50)
    next(stream)
    stream.close()
    assert stream.finish_reason == "cancelled"
    assert stream.report.output_tokens == len(stream.token_ids) > 0


def test_stream_is_taken_in_one_way():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    stream = engine.stream(ASKED[0], **GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="another way"):
        asyncio.run(stream.atext())


def test_stream_ends_with_the_loop_that_takes_it():
    engine = Engine(Recording(tiny_model("llama")), NEW_PROMPTS)

    async def leave():
        stream = engine.stream(ASKED[0], max_tokens=150, temperature=5.0, seed=1)
        async for _ in stream.apieces():
            return

    asyncio.run(leave())
    assert count_at_rest(engine.model.steps) < 140
    assert engine.scheduler.num_running == 0


def test_streams_that_many_threads_drop_leave_nothing():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)

    def use(prompt):
        stream = engine.stream(prompt, max_tokens=50, temperature=5.0, seed=1)
        return next(stream)

    with ThreadPoolExecutor(6) as threads:
        assert all(list(threads.map(use, ASKED * 4)))
    done = threading.Event()
    engine.scheduler.turn()
    while engine.scheduler.num_running and not done.wait(0.01):
        engine.scheduler.turn()
    assert engine.scheduler.nbytes == 0


def test_stream_may_change_threads_and_be_closed_anywhere():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    stream = engine.stream(ASKED[0], **GREEDY)
    stream.start()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: list(stream)).result(timeout=60)
    assert tuple(stream.token_ids) == alone("llama", ASKED[:1], **GREEDY)[0]
    other = engine.stream(ASKED[0], max_tokens=100, temperature=5.0, seed=1)

    async def begin():
        pieces = other.apieces()
        await anext(pieces)
        other.close()  # does not wait: the loop it would wait for is this one
        with pytest.raises(RuntimeError, match="another way"):
            next(other)
        return len("".join([piece async for piece in pieces]))

    assert asyncio.run(begin()) < 400
    assert other.finish_reason == "cancelled"


def test_a_streams_answer_is_whole_whatever_was_taken_of_it():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        untouched, begun, taken, awaited = (
            engine.stream("Who keeps it?", max_tokens=8) for _ in range(4)
        )
        first = next(begun)
        assert begun.generation.text == first
        assert "".join(taken) == asyncio.run(awaited.atext())
        texts = {stream.result().text for stream in (untouched, begun, taken, awaited)}
    (text,) = texts
    assert text.startswith(first)
    assert text != first


def test_a_stream_that_was_refused_is_no_empty_answer():
    bound = BatchConfig(max_rows=1, max_waiting=1)
    with Engine(tiny_model("llama"), NEW_PROMPTS, bound) as engine:
        first, second, third = (engine.stream("Who keeps it?", max_tokens=3) for _ in range(3))
        first.start()
        second.start()
        with pytest.raises(BusyError):
            third.start()
        with pytest.raises(BusyError):
            third.result()
        assert third.finish_reason == "error"
        assert first.result().text == second.result().text


def byte_fallback():
    """A tokenizer as Llama-2's: what it has no token for is spelled in single bytes."""
    words = ["▁Hello", "▁world", "▁ok"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    "text",
    ["\n\N{EURO SIGN}", "Hello\n\N{GRINNING FACE} ok", "\t\N{EURO SIGN}\n\N{EURO SIGN} world"],
)
@pytest.mark.parametrize("is_cut", [True, False])
def test_bytes_before_a_character_of_several_are_read_as_a_whole(text, is_cut):
    tokenizer = byte_fallback()
    vocab, ids = tokenizer.get_vocab(), []
    for word in text.split(" "):
        name = f"▁{word}"
        ids += [vocab[name]] if name in vocab else [vocab[f"<0x{b:02X}>"] for b in word.encode()]
    ids = ids[:-1] if is_cut else ids
    detokenizer = Detokenizer(tokenizer, ())
    said = "".join(map(detokenizer.push, ids))
    assert "\ufffd" not in said
    whole = said + detokenizer.flush()
    assert text.startswith(whole)  # nothing stands for the bytes of a character that is cut
    assert len(whole) >= len(tokenizer.decode(ids).rstrip("\ufffd"))
    if not is_cut:
        assert said == tokenizer.decode(ids)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_bytes_that_are_no_whole_character_behind_a_line_break_fail_no_answer(kept):
    tokenizer = byte_fallback()
    vocab, parts = tokenizer.get_vocab(), "\N{GRINNING FACE}".encode()[:kept]
    names = ["▁Hello", "<0x0A>", *(f"<0x{byte:02X}>" for byte in parts), "▁world", "▁ok"]
    ids = [vocab[name] for name in names]
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):  # control: the library's own
        [stream.step(tokenizer.backend_tokenizer, token) for token in ids]
    detokenizer = Detokenizer(tokenizer, ())
    said = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert said.startswith("Hello\n")
    assert said.endswith(" world ok")
    assert len(said) == len(tokenizer.decode(ids))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_answer_that_is_cut_within_a_character_ends_before_it(count):
    tokenizer = made()  # of which each byte of these is a token
    ids = tokenizer("a\N{EURO SIGN}").input_ids
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer, ())
    said = "".join(map(detokenizer.push, ids[:count])) + detokenizer.flush()
    assert said == ("a\N{EURO SIGN}" if count == 4 else "a")
