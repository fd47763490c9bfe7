"""Many requests at once: who comes in when, what they share, who waits, who leaves."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import CHUNKS, FAMILIES, UNMOVABLE, count_at_rest, tiny_model

from cached_rag import (
    BatchConfig,
    BusyError,
    ConfigError,
    ContextOverflowError,
    Engine,
    GenerationConfig,
    Import,
    LanguageModel,
    Said,
    Schema,
    StoreConfig,
)
from cached_rag.engine.decoding import Answering
from cached_rag.engine.prefill import Read
from cached_rag.engine.request import Request, Waiting

STEP = LanguageModel.step

WORDS = "the copper roof turned green in the rain and nobody knew why it did".split()  # noqa: SIM905
SYSTEM = " ".join(f"Rule {n}: {WORDS[n % 14]} is never {WORDS[n * 3 % 14]}." for n in range(24))
DOCUMENTS = [
    " ".join(f"Fact {letter}{n}: {WORDS[n * 5 % 14]} met {WORDS[n * 7 % 14]}." for n in range(16))
    for letter in "AB"
]
ASKED = [f"{SYSTEM}\n{d}\nQuestion {n}: why?" for d in DOCUMENTS for n in range(2)]
ASKED += [f"{SYSTEM}\nWhat is rule {n}?" for n in range(2)]
FAST = sorted(f for f in FAMILIES if tiny_model(f).can_batch)
GREEDY = {"max_tokens": 8, "method": "full"}


@pytest.fixture
def passes(monkeypatch):
    """The tokens of each row, for each pass; the engine that is asked."""
    found = []

    def recording(model, batch):
        found.append([len(row.token_ids) for row in batch])
        return STEP(model, batch)

    monkeypatch.setattr(LanguageModel, "step", recording)
    return found


def alone(family, asked, **options):
    """Twin: one after the other, sharing nothing."""
    engine = Engine(tiny_model(family), batch=BatchConfig(max_rows=1, shares=False))
    return [engine.generate(prompt, **options).token_ids for prompt in asked]


def begun(engine, asked, **options):
    streams = [engine.stream(prompt, **options) for prompt in asked]
    for stream in streams:
        stream.start()
    return streams


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_prompts_that_begin_alike_answer_as_alone(family):
    engine = Engine(tiny_model(family))
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone(family, ASKED, **GREEDY)
    shared = [answer.report.shared_kv_bytes for answer in answers]
    if family in FAST:
        token = engine.model.shapes.bytes_per_token
        counts = [engine.count_tokens(prompt) for prompt in (SYSTEM, f"{SYSTEM}\n{DOCUMENTS[0]}")]
        assert shared[0] == 0
        assert shared[1] // token >= counts[1]  # the document too
        assert all(count // token >= counts[0] for count in shared[1:])
        for answer in answers[1:]:
            report = answer.report
            assert report.cached_tokens * token == report.shared_kv_bytes
            assert report.charged_recompute < 0.5
    else:
        assert not any(shared)


def test_what_is_shared_is_kept_once():
    def peak(*, shares):
        engine = Engine(tiny_model("llama"), batch=BatchConfig(shares=shares))
        streams = begun(engine, ASKED, **GREEDY)
        for stream in streams:
            next(stream)
        count = engine.scheduler.nbytes // engine.model.shapes.bytes_per_token
        return count, ["".join(stream) for stream in streams]

    shared, copied = peak(shares=True), peak(shares=False)
    assert shared[1] == copied[1]
    sizes = [len(Engine(tiny_model("llama")).tokenization.render(p).text) for p in ASKED]
    assert copied[0] >= sum(1024 * -(-(size + 8) // 1024) for size in sizes) // 4
    assert shared[0] < copied[0] * 0.6


def test_nothing_is_kept_when_all_are_answered():
    engine = Engine(tiny_model("llama"))
    engine.generate_batch(ASKED, **GREEDY)
    assert engine.scheduler.nbytes == 0
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def test_who_is_shared_from_may_leave_first():
    engine = Engine(tiny_model("llama"))
    long = GREEDY | {"max_tokens": 24, "temperature": 5.0, "seed": 3}
    first = engine.stream(ASKED[0], **GREEDY)
    next(first)
    second = engine.stream(ASKED[1], **long)
    taken = next(second)
    first.close()
    others = engine.generate_batch(ASKED[2:4], **GREEDY)  # its memory must not be theirs
    assert [a.token_ids for a in others] == alone("llama", ASKED[2:4], **GREEDY)
    assert second.report.shared_kv_bytes > 0
    assert taken + "".join(second) == Engine(tiny_model("llama")).generate(ASKED[1], **long).text


SCHEMA = Schema.from_string(
    "<schema name='house'><user><module name='rooms'>"
    + " ".join(f"Room {n} is painted in {WORDS[n % 14]}." for n in range(20))
    + "</module><union><module name='cellar'>The cellar is dark.</module>"
    "<module name='attic'>The attic has doves.</module></union></user></schema>"
)
PARTS = [
    SCHEMA.prompt(Import("rooms"), Import(part), Said("user", question))
    for part in ("cellar", "attic")
    for question in ("Is it dark in there?", "Who lives there?")
]


@pytest.mark.parametrize("family", sorted({*FAST} - UNMOVABLE))
def test_unrepaired_modules_are_shared(family):
    reused = {}
    for method, options in (("reuse", {}), ("cacheblend", {"recompute_ratio": 1.0})):
        options |= {"method": method, "max_tokens": 6}
        together = Engine(tiny_model(family)).generate_batch(PARTS, **options)
        assert [answer.token_ids for answer in together] == alone(family, PARTS, **options)
        shared = [answer.report.shared_kv_bytes for answer in together]
        assert shared[0] == 0
        assert all(0 < count <= reused.setdefault(i, count) for i, count in enumerate(shared[1:]))


def test_modules_are_shared_behind_different_beginnings():
    engine = Engine(tiny_model("llama"))
    engine.encode(DOCUMENTS)
    asked = [f"{opening}\n{DOCUMENTS[0]}\nWhy?" for opening in ("Read now", "Think now")]
    together = engine.generate_batch(asked, method="reuse", max_tokens=8)
    twin = Engine(tiny_model("llama"), batch=BatchConfig(shares=False))
    twin.encode(DOCUMENTS)
    assert [a.text for a in together] == [
        twin.generate(prompt, method="reuse", max_tokens=8).text for prompt in asked
    ]
    lengths = {engine.count_tokens(prompt) for prompt in asked}
    shares = [answer.report.shared_kv_bytes > 0 for answer in together]
    assert shares == [False, len(lengths) == 1]  # only at the same positions


def test_approximate_beginnings_are_not_passed_on():
    """A method's answer must not depend on who else asks."""
    engine = Engine(tiny_model("llama"))
    engine.encode([SYSTEM])
    asked = [f"Read this. {SYSTEM}\nQuestion {n}?" for n in range(2)]
    alone = {
        method: engine.generate(asked[1], method=method, max_tokens=8).token_ids
        for method in ("full", "reuse")
    }
    for first in alone:
        for second in alone:
            streams = [
                engine.stream(prompt, method=method, max_tokens=8)
                for prompt, method in zip(asked, (first, second), strict=True)
            ]
            for stream in streams:
                stream.start()
            answer = [stream.result() for stream in streams][1]
            assert answer.token_ids == alone[second]
            assert (answer.report.shared_kv_bytes > 0) == (first == second)


def test_tenants_share_nothing():
    engine = Engine(tiny_model("llama"))
    other = engine.tenant("other")
    assert other.scheduler is engine.scheduler
    streams = [*begun(engine, ASKED[:1], **GREEDY), *begun(other, ASKED[:2], **GREEDY)]
    answers = [stream.result() for stream in streams]
    assert [a.report.shared_kv_bytes > 0 for a in answers] == [False, False, True]
    engine.encode(CHUNKS[:1])
    prompt = f"{CHUNKS[0]} Why?"
    assert engine.generate(prompt, max_tokens=2).report.cached_tokens > 0
    assert other.generate(prompt, max_tokens=2).report.cached_tokens == 0
    other.close()
    assert engine.generate(prompt, max_tokens=2).report.cached_tokens > 0


def test_rows_come_and_go_with_their_own_settings(passes):
    engine = Engine(tiny_model("llama"), batch=BatchConfig(max_rows=3))
    settings = [
        {"max_tokens": 3},
        {"max_tokens": 12},
        {"max_tokens": 9, "temperature": 3.0, "seed": 4},
        {"max_tokens": 12, "stop": ("e",)},
        {"max_tokens": 5, "temperature": 1.0, "top_k": 3, "seed": 5},
        {"max_tokens": 7, "method": "full", "repetition_penalty": 1.5},
    ]
    expected = [engine.generate(p, **s) for p, s in zip(ASKED, settings, strict=True)]
    passes.clear()
    streams = [engine.stream(p, **s) for p, s in zip(ASKED, settings, strict=True)]
    for stream in streams:
        stream.start()
    answers = [stream.result() for stream in streams]
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert [a.finish_reason for a in answers] == [a.finish_reason for a in expected]
    sizes = [len(rows) for rows in passes]
    assert max(sizes) == 3
    assert sizes.count(3) > 3  # as one left, the next came in


def test_who_asks_in_threads_and_loops_is_in_the_same_batch(passes):
    engine = Engine(tiny_model("llama"))
    options = {"max_tokens": 48, "method": "full"}
    expected = [engine.generate(prompt, **options).text for prompt in ASKED]
    passes.clear()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda p: engine.generate(p, **options).text, ASKED))
    assert found == expected
    assert max(len(rows) for rows in passes) > 2
    passes.clear()

    async def ask():
        return await asyncio.gather(*(engine.stream(p, **options).atext() for p in ASKED * 4))

    assert asyncio.run(ask()) == expected * 4
    assert max(len(rows) for rows in passes) == 16


def test_a_prompt_is_prefilled_between_the_tokens_of_others(passes):
    """A long prompt that nobody knows does not stop who is being answered."""
    engine = Engine(tiny_model("llama"), batch=BatchConfig(prefill_tokens=50))
    first = engine.stream("Why is it green?", max_tokens=40, temperature=5.0, seed=1)
    next(first)
    passes.clear()
    second = engine.stream(ASKED[0], **GREEDY)
    second.start()
    count = len(first.token_ids)
    assert second.result().token_ids == alone("llama", ASKED[:1], **GREEDY)[0]
    chunks = [rows[1] for rows in passes if len(rows) > 1 and rows[1] > 1]
    assert max(chunks) <= 50
    assert sum(chunks) >= engine.count_tokens(ASKED[0]) - 1
    assert len(first.token_ids) - count >= len(chunks)
    assert second.report.charged_recompute == 1.0


def test_too_many_requests_are_refused():
    engine = Engine(tiny_model("llama"), batch=BatchConfig(max_rows=1, max_waiting=2))
    streams = begun(engine, ASKED[:1], **GREEDY)
    next(streams[0])
    streams += begun(engine, ASKED[1:3], **GREEDY)
    with pytest.raises(BusyError, match="2 requests wait"):
        engine.stream(ASKED[3], **GREEDY).start()
    with pytest.raises(BusyError):
        asyncio.run(engine.stream(ASKED[3], **GREEDY).atext())
    assert engine.scheduler.num_waiting == 2
    answers = [stream.result() for stream in streams]
    assert [a.finish_reason for a in answers] == ["length"] * 3
    assert engine.generate(ASKED[3], **GREEDY).token_ids


def test_memory_is_bounded_and_everyone_is_answered(monkeypatch):
    model = tiny_model("llama")
    room = 2 * 1024 * model.shapes.bytes_per_token
    engine = Engine(model, batch=BatchConfig(max_bytes=room, shares=False))
    used = []

    def watching(model, batch):
        used.append(engine.scheduler.nbytes)
        return STEP(model, batch)

    monkeypatch.setattr(LanguageModel, "step", watching)
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone("llama", ASKED, **GREEDY)
    assert 0 < max(used) <= room
    small = Engine(model, batch=BatchConfig(max_bytes=room // 40))
    with pytest.raises(ContextOverflowError, match="max_bytes"):
        small.generate(ASKED[0], **GREEDY)
    assert small.generate("Why?", max_tokens=2).token_ids
    assert small.scheduler.num_waiting == 0


def test_sharing_lets_more_in_at_once(passes):
    model = tiny_model("llama")
    needed = 8 + max(Engine(model).count_tokens(prompt) for prompt in ASKED)
    room = int(2.5 * needed) * model.shapes.bytes_per_token
    for shares in (False, True):
        passes.clear()
        engine = Engine(model, batch=BatchConfig(max_bytes=room, shares=shares))
        engine.generate_batch(ASKED[:4], **GREEDY)
        sizes = max(len(rows) for rows in passes)
        assert sizes == (4 if shares else 2)


def test_tenants_take_turns():
    waiting = Waiting(None)

    def request(tenant):
        return Request(None, None, GenerationConfig(), tenant, read=Read(None, 0))

    greedy = [request("a") for _ in range(3)]
    modest = [request(name) for name in "bc"]
    for one in (*greedy, *modest):
        waiting.add(one)
    order = []
    while one := waiting.first():
        order.append(one)
        waiting.remove(one)
    assert order == [greedy[0], *modest, *greedy[1:]]
    assert len(waiting) == 0
    waiting.remove(greedy[0])  # nothing happens


def test_who_is_not_read_yet_lets_others_go_first_and_keeps_the_place():
    waiting, read = Waiting(None), Read(None, 0)
    unread = [Request(None, None, GenerationConfig(), name) for name in "ab"]
    others = [Request(None, None, GenerationConfig(), name, read=read) for name in "aacc"]
    for one in (*unread, *others):
        waiting.add(one)
    order = []
    for ready in (None, None, unread[1], None, None):
        if ready is not None:
            ready.read = read
        order.append(waiting.first())
        waiting.remove(order[-1])
    assert order == [others[0], others[2], unread[1], others[1], others[3]]
    assert list(waiting) == unread[:1]
    assert waiting.first() is None


def test_who_waits_can_be_cancelled():
    engine = Engine(tiny_model("llama"), batch=BatchConfig(max_rows=1))
    streams = begun(engine, ASKED[:3], **GREEDY)
    next(streams[0])
    streams[1].cancel()
    assert engine.scheduler.num_waiting == 1
    assert list(streams[1]) == []
    assert streams[1].finish_reason == "cancelled"
    assert streams[2].result().token_ids == alone("llama", ASKED[2:3], **GREEDY)[0]


def test_an_engine_that_closes_ends_what_runs():
    engine = Engine(tiny_model("llama"), batch=BatchConfig(max_rows=1))
    streams = begun(engine, ASKED[:2], **GREEDY)
    next(streams[0])
    engine.close()
    assert len(list(streams[0])) <= 1  # what was there before
    assert list(streams[1]) == []
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 2


def test_what_fails_for_every_row_fails_all_and_no_later_ones(monkeypatch):
    engine = Engine(tiny_model("llama"))
    fails = []

    def failing(model, batch):
        if fails:
            raise RuntimeError("out of memory")
        return STEP(model, batch)

    monkeypatch.setattr(LanguageModel, "step", failing)
    streams = begun(engine, ASKED[:3], **GREEDY)
    for stream in streams:
        next(stream)
    fails.append(True)
    for stream in streams:
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
    assert engine.scheduler.nbytes == 0
    fails.clear()
    assert engine.generate(ASKED[0], **GREEDY).finish_reason == "length"


def test_bad_prompts_fail_alone():
    engine = Engine(tiny_model("llama"))
    streams = [engine.stream(p, **GREEDY) for p in (ASKED[0], "word " * 2000, ASKED[1])]
    for stream in streams:
        stream.start()
    assert streams[0].result().token_ids
    with pytest.raises(ContextOverflowError):
        streams[1].result()
    assert list(streams[1]) == []
    assert streams[2].result().token_ids == alone("llama", ASKED[1:2], **GREEDY)[0]


def test_a_stream_is_taken_in_one_way():
    engine = Engine(tiny_model("llama"))
    stream = engine.stream(ASKED[0], **GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="another way"):
        asyncio.run(stream.atext())


def test_a_loop_that_ends_takes_its_requests_with_it(passes):
    engine = Engine(tiny_model("llama"))

    async def leave():
        stream = engine.stream(ASKED[0], max_tokens=150, temperature=5.0, seed=1)
        async for _ in stream.apieces():
            return

    asyncio.run(leave())
    assert count_at_rest(passes) < 140
    assert engine.scheduler.num_running == 0


def test_streams_dropped_by_many_threads_leave_nothing():
    engine = Engine(tiny_model("llama"))

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


def test_a_conversation_goes_on_where_it_was():
    engine = Engine(tiny_model("llama"), batch=BatchConfig(recent_bytes=1 << 26))
    turns = [{"role": "user", "content": f"{DOCUMENTS[0]} Why is it green?"}]
    first = engine.generate(turns, max_tokens=8)
    assert first.report.cached_tokens == 0
    said = {"role": "assistant", "content": first.text}
    turns += [said, {"role": "user", "content": "And nobody knew?"}]
    second = engine.generate(turns, max_tokens=8)
    twin = Engine(tiny_model("llama")).generate(turns, max_tokens=8)
    assert second.token_ids == twin.token_ids
    assert second.report.cached_tokens >= first.report.prompt_tokens - 1
    assert second.report.prompt_tokens == twin.report.prompt_tokens
    other = engine.tenant("other").generate(turns, max_tokens=8)
    assert other.report.cached_tokens == 0


def test_the_longest_unused_of_what_is_kept_goes_first():
    model = tiny_model("llama")
    room = 2560 * model.shapes.bytes_per_token
    engine = Engine(model, batch=BatchConfig(recent_bytes=room))
    asked = [f"{letter} is another beginning. {SYSTEM}" for letter in "ABC"]

    def cached(prompt):
        report = engine.generate(prompt, **GREEDY).report
        assert engine.scheduler.recent_nbytes <= room
        assert engine.scheduler.nbytes == 0
        return report.cached_tokens > 0

    assert [cached(prompt) for prompt in asked[:2]] == [False, False]
    assert cached(asked[0])
    assert not cached(asked[2])  # for which B had to go
    assert cached(asked[0])
    assert not cached(asked[1])
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone("llama", ASKED, **GREEDY)


@pytest.mark.parametrize("family", FAST)
def test_kept_beginnings_give_the_same_answers(family):
    engine = Engine(tiny_model(family), batch=BatchConfig(recent_bytes=1 << 26))
    found = [engine.generate(prompt, **GREEDY) for prompt in ASKED]
    assert [answer.token_ids for answer in found] == alone(family, ASKED, **GREEDY)
    assert all(answer.report.cached_tokens > 100 for answer in found[1:])


def test_what_is_not_exact_is_not_kept():
    engine = Engine(tiny_model("llama"), batch=BatchConfig(recent_bytes=1 << 26))
    engine.encode(DOCUMENTS)
    prompt = f"See: {DOCUMENTS[0]}\nWhy?"
    engine.generate(prompt, method="reuse", max_tokens=4)
    assert engine.scheduler.recent_nbytes == 0
    assert engine.generate(prompt, method="full", max_tokens=4).report.cached_tokens == 0


def test_plain_prompts_and_shared_modules_use_the_same_slabs():
    engine = Engine(tiny_model("llama"))
    engine.encode(DOCUMENTS)
    asked = [(f"{DOCUMENTS[0]}\nQuestion {n}?", "reuse") for n in range(2)]
    asked += [(f"What is {word}, and why?", "full") for word in WORDS[1:4]]
    expected = [engine.generate(p, method=m, max_tokens=8).token_ids for p, m in asked]
    streams = [engine.stream(p, method=m, max_tokens=8) for p, m in asked]
    for stream in streams:
        stream.start()
    assert [stream.result().token_ids for stream in streams] == expected
    assert streams[1].report.shared_kv_bytes > 0


def test_short_beginnings_are_shared_by_those_who_come_together():
    engine = Engine(tiny_model("llama"))
    head = SYSTEM[: len(SYSTEM) // 3]
    assert 130 < engine.count_tokens(head) < 250
    first = engine.stream("Why is it green?", max_tokens=60, temperature=5.0, seed=1)
    next(first)
    answers = engine.generate_batch([f"{head} {n}?" for n in range(3)], **GREEDY)
    assert [a.report.shared_kv_bytes > 0 for a in answers] == [False, True, True]


class Panic(BaseException):
    """As libraries in Rust raise them."""


def test_a_turn_that_breaks_fails_all_and_the_next_request_is_served(monkeypatch):
    engine = Engine(tiny_model("llama"))
    fails = []

    def failing(model, batch):
        if fails:
            fails.clear()
            raise Panic  # no Exception: nothing in a turn handles it
        return STEP(model, batch)

    monkeypatch.setattr(LanguageModel, "step", failing)
    fails.append(True)

    async def ask():
        done = [engine.stream(prompt, **GREEDY).atext() for prompt in ASKED[:3]]
        return await asyncio.gather(*done, return_exceptions=True)

    assert all(isinstance(error, Panic) for error in asyncio.run(ask()))
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(lambda: engine.generate(ASKED[0], **GREEDY)).result()
    assert again.token_ids == alone("llama", ASKED[:1], **GREEDY)[0]


def test_an_interrupt_ends_whose_tokens_it_took(monkeypatch):
    engine = Engine(tiny_model("llama"))
    streams = begun(engine, ASKED[:3], **GREEDY)
    for stream in streams:
        next(stream)
    take, calls = Answering.take, []

    def interrupted(answer, logits):
        calls.append(answer)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return take(answer, logits)

    monkeypatch.setattr(Answering, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.scheduler.turn()
    assert [stream.finish_reason for stream in streams[1:]] == ["error", "error"]
    monkeypatch.setattr(Answering, "take", take)
    "".join(streams[0])
    assert tuple(streams[0].token_ids) == alone("llama", ASKED[:1], **GREEDY)[0]
    for stream in streams[1:]:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert engine.scheduler.nbytes == 0


def test_a_stream_may_change_threads_and_be_closed_anywhere():
    engine = Engine(tiny_model("llama"))
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


def test_a_request_cancelled_while_it_is_queued_is_not_answered():
    engine = Engine(tiny_model("llama"))
    stream = engine.stream(ASKED[0], **GREEDY)
    stream.start()
    stream._request.is_cancelled = True  # as another thread may at any moment
    assert list(stream) == []
    assert stream.finish_reason == "cancelled"
    assert engine.scheduler.num_waiting == 0


def test_what_comes_back_changed_is_not_exact(tmp_path):
    """A codec that loses digits makes a prompt's beginning its own."""
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path), codec="int8"))
    engine.encode(DOCUMENTS[:1], prefix=SYSTEM)
    asked = [f"{SYSTEM}{DOCUMENTS[0]}\nQuestion {n}?" for n in range(2)]
    streams = [
        engine.stream(prompt, method=method, max_tokens=4)
        for prompt, method in zip(asked, ("prefix", "full"), strict=True)
    ]
    for stream in streams:
        stream.start()
    answers = [stream.result() for stream in streams]
    assert answers[0].report.cached_tokens > 200
    assert answers[1].report.cached_tokens == 0
    engine.close()


def test_repaired_sequences_are_not_exact():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
    engine.encode(DOCUMENTS)
    prompt = f"{DOCUMENTS[0]}\n{DOCUMENTS[1]}\nWhy?"
    engine.generate(prompt, max_tokens=2)
    engine.encode(DOCUMENTS[:1], prefix="")
    streams = [engine.stream(prompt, method=m, max_tokens=4) for m in ("auto", "full")]
    for stream in streams:
        stream.start()
    assert streams[0].result().report.modules_hit == 2
    assert streams[1].result().report.shared_kv_bytes == 0


def test_tenants_encode_in_the_background_only_while_nobody_asks():
    engine = Engine(tiny_model("llama"))
    other = engine.tenant("b")
    done = []
    stream = engine.stream(ASKED[0], **GREEDY)
    next(stream)
    other.write_back.offer("x", lambda: done.append("x"))
    assert count_at_rest(done) == 0
    stream.close()
    other.write_back.drain()
    assert done == ["x"]
    other.write_back.offer("y", lambda: done.append("y"))
    other.close()
    engine.write_back.offer("z", lambda: done.append("z"))  # closing one stops no other
    engine.write_back.drain()
    assert done[-1] == "z"


def test_a_storm_of_requests_gives_right_answers_and_leaves_nothing():
    """Threads that ask, stream, leave, cancel and encode at random, in three namespaces."""
    model = tiny_model("llama")
    room = 4 * 1024 * model.shapes.bytes_per_token
    bounds = BatchConfig(max_rows=5, max_bytes=room, recent_bytes=room)
    engine = Engine(model, StoreConfig(sequence_bytes=1 << 22), bounds)
    engine.encode(DOCUMENTS)
    engines = [engine, engine.tenant("a"), engine.tenant("b")]
    expected = dict(zip(ASKED, alone("llama", ASKED, **GREEDY), strict=True))

    def ask(engine, draw):
        prompt = draw.choice(ASKED)
        assert engine.generate(prompt, **GREEDY).token_ids == expected[prompt]

    def ask_several(engine, draw):
        prompts = draw.sample(ASKED, 3)
        answers = engine.generate_batch(prompts, **GREEDY)
        assert [a.token_ids for a in answers] == [expected[prompt] for prompt in prompts]

    def leave(engine, draw):
        method = draw.choice(["full", "auto", "reuse"])
        stream = engine.stream(draw.choice(ASKED), method=method, max_tokens=40, temperature=5.0)
        for _ in range(draw.randint(0, 5)):
            next(stream, None)
        if draw.random() < 0.5:
            stream.close()

    def cancel(engine, draw):
        stream = engine.stream(draw.choice(PARTS), method="reuse", max_tokens=20)
        stream.start()
        threading.Event().wait(draw.random() / 50)
        stream.cancel()

    def cancel_a_task(engine, draw):
        async def go():
            prompts = draw.sample(ASKED, 3)
            tasks = [asyncio.create_task(engine.stream(p, **GREEDY).atext()) for p in prompts]
            await asyncio.sleep(draw.random() / 20)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(go())

    def encode(engine, draw):
        engine.encode([f"{draw.random()} {DOCUMENTS[0]}"])

    def client(seed):
        draw = random.Random(seed)
        for _ in range(16):
            deed = draw.choice([ask, ask, ask_several, leave, cancel, cancel_a_task, encode])
            deed(draw.choice(engines), draw)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(client, range(6)))
    engine.scheduler.turn()
    scheduler_ = engine.scheduler
    assert (scheduler_.num_running, scheduler_.num_waiting, scheduler_.nbytes) == (0, 0, 0)
    assert scheduler_.recent_nbytes <= room
    for one in engines[::-1]:
        one.close()


def test_settings_are_checked():
    for bad in ({"max_rows": 0}, {"max_bytes": 0}, {"max_waiting": -1}, {"prefill_tokens": 0}):
        with pytest.raises(ConfigError):
            BatchConfig(**bad)


def test_most_families_prefill_in_pieces():
    assert {f for f in FAST if tiny_model(f).can_append} >= {"llama", "qwen3", "phi3", "gpt_neox"}
