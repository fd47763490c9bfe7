"""What clients are told while the server stops, and whose work ends before it is done."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import CHUNKS, tiny_model
from doubles import Recording, slow
from fresh import run_fresh
from served import GREEDY, MESSAGES, running, until

from cached_rag import Engine
from cached_rag.library.encode import EncodeSummary

pytestmark = pytest.mark.slow


@pytest.fixture
def engine():
    """Answers that take 12 seconds."""
    model = Recording(tiny_model("llama"), slow(0.02))
    model.eos_ids = frozenset()
    with Engine(model) as made:
        yield made


def test_newcomers_are_told_and_so_is_who_is_cut_off(engine):
    with ThreadPoolExecutor(2) as threads, running(engine, drain=60) as server:
        url = f"{server.address}/v1/chat/completions"
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 600}
        kept = httpx.Client()
        assert kept.get(f"{server.address}/health").status_code == 200
        asked = [
            threads.submit(httpx.post, url, json=body | {"stream": stream}, timeout=60)
            for stream in (True, False)
        ]
        assert until(lambda: engine.scheduler.num_running == 2)
        server.handle_exit(signal.SIGINT, None)
        for client in (httpx, kept):  # a new connection, and one that was open
            refused = client.post(url, json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["type"] == "server_error"
            health = client.get(f"{server.address}/health")
            assert (health.status_code, health.json()["running"]) == (503, 2)
        kept.close()
        server.handle_exit(signal.SIGINT, None)  # impatient: now at once
        streamed, whole = (one.result() for one in asked)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "stopping")
        assert whole.headers["retry-after"] == "5"
        assert streamed.status_code == 200
        last = json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "stopping"
    assert until(lambda: engine.scheduler.num_running == 0)


def test_documents_that_are_cut_off_are_told_too(engine, monkeypatch):
    def slow(*_, **__):
        time.sleep(1)

    monkeypatch.setattr(type(engine), "encode", slow)
    with ThreadPoolExecutor(1) as threads, running(engine, drain=60) as server:
        url = f"{server.address}/v1/documents"
        asked = threads.submit(httpx.post, url, json={"texts": list(CHUNKS) * 20}, timeout=60)
        assert until(lambda: server.server_state.tasks)
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        assert asked.result().status_code == 503


def test_who_leaves_has_no_more_texts_encoded(engine, monkeypatch):
    calls = []

    def slow(_, texts, *__, **___):
        calls.extend(texts)
        time.sleep(0.05)
        return EncodeSummary(1, 0, (), 1, 0.0)

    monkeypatch.setattr(type(engine), "encode", slow)
    texts = [f"text {n}" for n in range(400)]  # 20 seconds
    with running(engine) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}/v1/documents", json={"texts": texts}, timeout=0.5)
        assert until(lambda: calls and not server.server_state.tasks)
    assert len(calls) < 400


def test_a_deletion_is_carried_out_when_its_client_has_left(engine, monkeypatch):
    forget, done = type(engine).forget, []

    def slow(self, texts):
        time.sleep(1)
        done.append(forget(self, texts))
        return done[-1]

    engine.encode([CHUNKS[0]])
    monkeypatch.setattr(type(engine), "forget", slow)
    with running(engine) as server:
        url = f"{server.address}/v1/documents"
        with pytest.raises(httpx.ReadTimeout):
            httpx.request("DELETE", url, json={"texts": [CHUNKS[0]]}, timeout=0.3)
        assert until(lambda: done)
    assert done == [1]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_documents_hold_no_answer(engine, monkeypatch, method):
    goes_on = threading.Event()

    def held(*_, **__):
        goes_on.wait(60)
        return 0 if method == "DELETE" else EncodeSummary(1, 0, (), 1, 0.0)

    monkeypatch.setattr(type(engine), "forget" if method == "DELETE" else "encode", held)
    clients = 40  # more than asyncio has threads
    with ThreadPoolExecutor(clients) as threads, running(engine) as server:
        url, body = f"{server.address}/v1/documents", {"texts": ["some text"]}
        asked = [
            threads.submit(httpx.request, method, url, json=body, timeout=90)
            for _ in range(clients)
        ]
        try:
            assert until(lambda: len(server.server_state.tasks) == clients)
            answered = GREEDY | {"messages": MESSAGES}
            url = f"{server.address}/v1/chat/completions"
            assert httpx.post(url, json=answered, timeout=20).status_code == 200
        finally:
            goes_on.set()
        assert {one.result().status_code for one in asked} == {200}


def test_a_second_interrupt_ends_the_server_without_a_traceback():
    code = """
import signal
from conftest import tiny_model
from cached_rag import Engine
from cached_rag.errors import ClosedError
from cached_rag.server.app import create_app
from cached_rag.server.run import Server, bind
from cached_rag.server.service import Service
engine = Engine(tiny_model("llama"))
app = create_app(Service(engine, "tiny"), at_end=engine.close)
def interrupt():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
try:
    Server(app, 1, interrupt).run(sockets=[bind("127.0.0.1", 0)])
except KeyboardInterrupt:
    try: engine.check_open()
    except ClosedError: print("interrupted, closed")
"""
    said = "stopping; 0 requests are finished first\n"
    assert run_fresh(code) == (0, "interrupted, closed\n", said)
