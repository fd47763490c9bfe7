"""Many requests at once: who comes in when, who waits, who leaves; and all answer as if alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from conftest import CHUNKS, NEW_PROMPTS, count_at_rest, tiny_model
from crowd import ASKED, DOCUMENTS, GREEDY, PARTS, alone, begun
from doubles import Recording

from cached_rag import BatchConfig, ConfigError, Engine, StoreConfig
from cached_rag.engine.waiting import Waiting
from cached_rag.errors import BusyError, ContextOverflowError

PROMPTS = [f"{chunk}\n\nWhat is said {word}?" for chunk in CHUNKS for word in ("here", "there")]


@pytest.fixture
def model():
    return Recording(tiny_model("llama"))


def test_scheduler_lets_rows_come_and_go_with_their_own_settings(model):
    engine = Engine(model, NEW_PROMPTS, BatchConfig(max_rows=3))
    settings = [
        {"max_tokens": 3},
        {"max_tokens": 12},
        {"max_tokens": 9, "temperature": 3.0, "seed": 4},
        {"max_tokens": 12, "stop": ("e",)},
        {"max_tokens": 5, "temperature": 1.0, "top_k": 3, "seed": 5},
        {"max_tokens": 7, "method": "full", "repetition_penalty": 1.5},
    ]
    expected = [engine.generate(p, **s) for p, s in zip(ASKED, settings, strict=True)]
    model.steps.clear()
    streams = [engine.stream(p, **s) for p, s in zip(ASKED, settings, strict=True)]
    for stream in streams:
        stream.start()
    answers = [stream.result() for stream in streams]
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert [a.finish_reason for a in answers] == [a.finish_reason for a in expected]
    sizes = [len(rows) for rows in model.steps]
    assert max(sizes) == 3
    assert sizes.count(3) > 3  # as one left, the next came in


def test_scheduler_answers_a_batch_as_one_by_one_in_fewer_passes(model):
    engine = Engine(model, NEW_PROMPTS)
    engine.encode(CHUNKS, context=None)
    options = {"max_tokens": 12, "stop": ("zzz",), "drafts": False}
    single = [engine.generate(prompt, **options) for prompt in PROMPTS]
    assert {len(rows) for rows in model.steps} == {1}
    count = len(model.steps)
    model.steps.clear()
    together = engine.generate_batch(PROMPTS, **options)
    assert [answer.text for answer in together] == [answer.text for answer in single]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in single]
    sizes = [len(rows) for rows in model.steps]
    assert sum(sizes) == count + len(PROMPTS)  # their own rows were computed in a step, too
    assert max(sizes) > 2
    assert len(sizes) < count / 2


def test_scheduler_has_one_batch_for_threads_and_loops(model):
    engine = Engine(model, NEW_PROMPTS)
    options = {"max_tokens": 48, "method": "full"}
    expected = [engine.generate(prompt, **options).text for prompt in ASKED]
    model.steps.clear()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda p: engine.generate(p, **options).text, ASKED))
    assert found == expected
    assert max(len(rows) for rows in model.steps) > 2
    model.steps.clear()

    async def ask():
        return await asyncio.gather(*(engine.stream(p, **options).atext() for p in ASKED * 4))

    assert asyncio.run(ask()) == expected * 4
    assert max(len(rows) for rows in model.steps) == 16


def test_scheduler_prefills_a_prompt_between_the_tokens_of_others(model):
    """A long prompt that nobody knows does not stop who is being answered."""
    engine = Engine(model, NEW_PROMPTS, BatchConfig(prefill_tokens=50))
    first = engine.stream("Why is it green?", max_tokens=40, temperature=5.0, seed=1)
    next(first)
    model.steps.clear()
    second = engine.stream(ASKED[0], **GREEDY)
    second.start()
    count = len(first.token_ids)
    assert second.result().token_ids == alone("llama", ASKED[:1], **GREEDY)[0]
    chunks = [rows[1] for rows in model.steps if len(rows) > 1 and rows[1] > 1]
    assert max(chunks) <= 50
    assert sum(chunks) >= engine.count_tokens(ASKED[0]) - 1
    assert len(first.token_ids) - count >= len(chunks)
    assert second.report.charged_recompute == 1.0


def test_scheduler_refuses_too_many_requests():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(max_rows=1, max_waiting=2))
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


def test_who_fills_the_queue_leaves_others_their_share():
    waiting = Waiting(6)
    for _ in range(6):
        waiting.add(queued("a", object()))
    for tenant in "bbbccdd":  # of six each of two tenants has three, of three two, of four one
        with suppress(BusyError):
            waiting.add(queued(tenant, object()))
    lengths = Counter(request.tenant for request in waiting)
    assert lengths == {"a": 6, "b": 3, "c": 2, "d": 1}
    for tenant in "abcde":  # twelve, which is all
        with pytest.raises(BusyError, match="12 requests wait already"):
            waiting.add(queued(tenant, object()))


def test_scheduler_keeps_to_its_memory_and_answers_everyone(model):
    room = 2 * 1024 * model.shapes.bytes_per_token
    engine = Engine(model, NEW_PROMPTS, BatchConfig(max_bytes=room, shares=False))
    used = []
    model.before = lambda _: used.append(engine.scheduler.nbytes)
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone("llama", ASKED, **GREEDY)
    assert 0 < max(used) <= room
    small = Engine(model, NEW_PROMPTS, BatchConfig(max_bytes=room // 40))
    with pytest.raises(ContextOverflowError, match="max_bytes"):
        small.generate(ASKED[0], **GREEDY)
    assert small.generate("Why?", max_tokens=2).token_ids
    assert small.scheduler.num_waiting == 0


def test_scheduler_lets_more_in_where_they_share(model):
    needed = 8 + max(Engine(model, NEW_PROMPTS).count_tokens(prompt) for prompt in ASKED)
    room = int(2.5 * needed) * model.shapes.bytes_per_token
    for shares in (False, True):
        model.steps.clear()
        engine = Engine(model, NEW_PROMPTS, BatchConfig(max_bytes=room, shares=shares))
        engine.generate_batch(ASKED[:4], **GREEDY)
        assert max(len(rows) for rows in model.steps) == (4 if shares else 2)


def test_scheduler_lets_tenants_take_turns():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(max_rows=1, prefill_tokens=1))
    asked = [
        engine.stream(f"{n} Why?", tenant=name, max_tokens=1) for n, name in enumerate("aaabc")
    ]
    for stream in asked:
        stream.start()
    order = []
    while len(order) < len(asked):  # each turn answers one
        engine.scheduler.turn()
        order += [n for n, one in enumerate(asked) if one.report.total_ms and n not in order]
    assert order == [0, 3, 4, 1, 2]


def queued(tenant, reading=None):
    """A request as far as the queue looks at it."""
    prompt = SimpleNamespace(reading=reading)
    return SimpleNamespace(tenant=tenant, prompt=prompt, is_wanted=True)


def test_queue_lets_others_go_before_who_is_not_read_yet():
    waiting, read = Waiting(None), object()
    unread = [queued(name) for name in "ab"]
    others = [queued(name, read) for name in "aacc"]
    for one in (*unread, *others):
        waiting.add(one)
    order = []
    for ready in (None, None, unread[1], None, None):
        if ready is not None:
            ready.prompt.reading = read
        order.append(waiting.first())
        waiting.remove(order[-1])
    assert order == [others[0], others[2], unread[1], others[1], others[3]]
    assert list(waiting) == unread[:1]
    assert waiting.first() is None


def test_who_asks_again_as_soon_as_he_is_answered_does_not_go_before_who_waits():
    waiting, order = Waiting(None), []
    for tenant in "bbba":
        waiting.add(queued(tenant, object()))
    for _ in range(6):
        first = waiting.first()
        waiting.admit(first)
        order.append(first.tenant)
        if first.tenant == "a":
            waiting.add(queued("a", object()))
    assert order == [*"bababa"]


def test_who_cancels_some_does_not_wait_for_them():
    waiting = Waiting(None)
    asked = [queued(tenant, object()) for tenant in "aaaabb"]
    for one in asked:
        waiting.add(one)
    for one in asked[:3]:
        waiting.remove(one)
    waiting.admit(waiting.first())
    assert waiting.first() is asked[3]


def test_queue_refuses_who_would_wait_too_long(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cached_rag.engine.waiting.time.monotonic", lambda: now[0])
    waiting, line = Waiting(None, 10), [queued("a", object()) for _ in range(40)]
    for one in line[:10]:
        waiting.add(one)
    for one in line[:5]:  # one in two seconds
        now[0] += 2
        waiting.admit(one)
    waiting.add(line[10])  # six are there, five of them before it
    with pytest.raises(BusyError, match=r"not be begun for 12 .* again in 2 s, ") as refused:
        waiting.add(line[11])
    assert refused.value.retry_after == pytest.approx(2)
    waiting.add(queued("b", object()))  # whose turn comes after one of the other's
    now[0] += 60  # nothing gets on
    with pytest.raises(BusyError):
        waiting.add(queued("b", object()))


def test_time_in_which_nobody_waits_is_no_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cached_rag.engine.waiting.time.monotonic", lambda: now[0])
    waiting = Waiting(None, 10)
    for number in range(8):
        now[0] += 1000
        one = queued("a", object())
        (waiting.add if number % 2 else waiting.put_back)(one)
        now[0] += 1
        waiting.admit(one)
    for _ in range(8):
        waiting.add(queued("a", object()))
    with pytest.raises(ConfigError, match="max_wait_seconds"):
        BatchConfig(max_wait_seconds=0)


def test_scheduler_cancels_who_waits():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(max_rows=1))
    streams = begun(engine, ASKED[:3], **GREEDY)
    next(streams[0])
    streams[1].cancel()
    assert engine.scheduler.num_waiting == 1
    assert list(streams[1]) == []
    assert streams[1].finish_reason == "cancelled"
    assert streams[2].result().token_ids == alone("llama", ASKED[2:3], **GREEDY)[0]


def test_scheduler_does_not_answer_who_is_cancelled_while_others_come_in():
    class Cancelling(Recording):
        def prefill(self, *given, **options):
            second.cancel()
            return self.model.prefill(*given, **options)

    engine = Engine(Cancelling(tiny_model("llama")), NEW_PROMPTS)
    first, second = begun(engine, PROMPTS[:2], **GREEDY)
    assert first.result().finish_reason == "length"
    assert list(second) == []
    assert second.finish_reason == "cancelled"
    assert not second.report.prompt_tokens
    assert engine.scheduler.num_waiting == 0


def test_scheduler_ends_what_runs_when_its_engine_closes():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(max_rows=1))
    streams = begun(engine, ASKED[:2], **GREEDY)
    next(streams[0])
    engine.close()
    assert len(list(streams[0])) <= 1  # what was there before
    assert list(streams[1]) == []
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 2


def test_scheduler_keeps_nothing_when_all_are_answered():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.generate_batch(ASKED, **GREEDY)
    assert engine.scheduler.nbytes == 0
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def test_background_encodes_only_while_nobody_asks_any_tenant():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
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


def test_scheduler_answers_a_storm_rightly_and_keeps_nothing():
    """Threads that ask, stream, leave, cancel and encode at random, in three namespaces."""
    model = tiny_model("llama")
    room = 4 * 1024 * model.shapes.bytes_per_token
    bounds = BatchConfig(max_rows=5, max_bytes=room)
    engine = Engine(model, StoreConfig(sequence_bytes=room, keeps_repaired=False), bounds)
    engine.encode(DOCUMENTS, context=None)
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
        engine.encode([f"{draw.random()} {DOCUMENTS[0]}"], context=None)

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
    assert engine.sequences.nbytes <= room
    for one in engines[::-1]:
        one.close()


def test_batch_settings_are_checked():
    for bad in ({"max_rows": 0}, {"max_bytes": 0}, {"max_waiting": -1}, {"prefill_tokens": 0}):
        with pytest.raises(ConfigError):
            BatchConfig(**bad)
