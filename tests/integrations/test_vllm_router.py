"""The prefill node's server, between a client and a vLLM that notes what it is asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm_cached_rag.agreed import ticket_of
from vllm_cached_rag.node import PrefillNode
from vllm_cached_rag.router import create_app

from cached_rag import Engine
from cached_rag.server.run import bind

CHAT = "/v1/chat/completions"
BODY = {
    "model": "m",
    "temperature": 0.5,
    "messages": [{"role": "user", "content": f"{CHUNKS[0]}\n\nWho?"}],
}
STREAM = b'data: {"a": 1}\n\ndata: [DONE]\n\n'


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


class Vllm(httpx.AsyncBaseTransport):
    """Notes requests, and whether the KV of each was there when it was answered."""

    def __init__(self, node):
        self.node, self.asked, self.found, self.fails = node, [], [], False
        self.stream = None

    async def handle_async_request(self, request):
        if self.fails:
            raise httpx.ConnectError("refused")
        body = json.loads(await request.aread() or b"{}")
        self.asked.append((request, dict(body)))
        ids = body.get("kv_transfer_params", {}).get("prompt_token_ids", [])
        ticket = ticket_of(body.get("kv_transfer_params"), body.get("cache_salt"))
        self.found.append(bool(ticket) and self.node._handoff.has(ticket.name, ids[:-1]))
        headers = {"content-type": "text/event-stream", "connection": "close"}
        if self.stream is not None:
            return httpx.Response(200, headers=headers, stream=self.stream)
        return httpx.Response(200, headers=headers, content=STREAM)


@pytest.fixture
def node(tmp_path):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(CHUNKS, context=None)
    return PrefillNode(engine, str(tmp_path), "reuse")


@pytest.fixture
def vllm(node):
    return Vllm(node)


@pytest.fixture
def client(node, vllm):
    app = create_app(node, "http://vllm:8000", "secret", 10_000, vllm)
    with TestClient(app, headers={"Authorization": "Bearer secret"}) as client:
        yield client


def test_a_prompt_is_prefilled_and_all_else_passed_on(client, node, vllm):
    answer = client.post(CHAT, json=BODY, headers={"x-request-id": "7"})
    assert answer.content == STREAM
    assert answer.headers["x-cached-rag"].startswith("reuse: ")
    ((request, body),) = vllm.asked
    assert request.url == "http://vllm:8000" + CHAT
    assert request.headers["authorization"] == "Bearer secret"  # vLLM checks it, too
    assert request.headers["x-request-id"] == "7"
    ids = node._engine.prefill(BODY["messages"], method="full").tokens.ids
    assert body["kv_transfer_params"]["prompt_token_ids"] == ids
    assert {name: body[name] for name in BODY} == BODY
    assert vllm.found == [True]
    ticket = ticket_of(body["kv_transfer_params"], body["cache_salt"])
    assert until(lambda: not node._handoff.has(ticket.name, ids[:-1]))  # it has been answered


def test_a_name_is_used_once(client, vllm):
    client.post(CHAT, json=BODY)
    client.post(CHAT, json=BODY)
    (_, first), (_, second) = vllm.asked
    assert first["cache_salt"] != second["cache_salt"]


def test_what_only_vllm_renders_goes_there_as_it_came(client, vllm):
    body = BODY | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = client.post(CHAT, json=body)
    assert vllm.asked[0][1] == body
    assert answer.headers["x-cached-rag"].startswith("prefilled by vLLM: ")


def test_other_paths_are_vllms(client, vllm):
    assert client.get("/v1/models?a=1").content == STREAM
    assert str(vllm.asked[0][0].url) == "http://vllm:8000/v1/models?a=1"


@pytest.mark.parametrize("key", ["", "Bearer secre", "Bearer sécret"])
def test_nobody_asks_without_the_key(client, vllm, key):
    answer = client.post(CHAT, json=BODY, headers={"Authorization": key.encode()})
    assert answer.status_code == 401
    assert not vllm.asked


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[]", 400), (b"[" * 9000, 400), (b" " * 10_001, 413)]
)
def test_what_is_no_request_is_refused(client, vllm, content, status):
    assert client.post(CHAT, content=content).status_code == status
    assert not vllm.asked


def test_a_vllm_that_is_away_is_said_and_leaves_no_kv(client, node, vllm):
    vllm.fails = True
    assert client.post(CHAT, json=BODY).status_code == 502
    assert until(lambda: len(node._handoff._disk) == 0)


class Endless(httpx.AsyncByteStream):
    """A stream whose second piece never comes."""

    def __init__(self):
        self.is_closed = False

    async def __aiter__(self):
        yield STREAM
        await asyncio.sleep(600)

    async def aclose(self):
        self.is_closed = True


@contextmanager
def serving(app):
    """The address of a server."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    work = server.serve(sockets=[bound])
    thread = threading.Thread(target=lambda: asyncio.run(work), daemon=True)
    thread.start()
    assert until(lambda: server.started)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_a_client_that_leaves_ends_vllms_answer_and_leaves_no_kv(node, vllm):
    stream = vllm.stream = Endless()
    with serving(create_app(node, "http://vllm:8000", transport=vllm)) as url:
        with httpx.stream("POST", url + CHAT, json=BODY, timeout=30) as answer:
            pieces = answer.iter_bytes()  # dropped, it would close the connection
            assert next(pieces) == STREAM
            assert len(node._handoff._disk) == 1
        assert until(lambda: stream.is_closed)
        assert until(lambda: len(node._handoff._disk) == 0)


class Silent(httpx.AsyncBaseTransport):
    """A vLLM that says nothing before its whole answer is made."""

    def __init__(self):
        self.heard = []

    async def handle_async_request(self, request):
        self.heard.append("asked")
        try:
            await asyncio.sleep(600)
        finally:
            self.heard.append("ended")


def test_a_client_that_leaves_before_the_answer_begins_ends_it_too(node):
    silent = Silent()
    with serving(create_app(node, "http://vllm:8000", transport=silent)) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as client:
            body = json.dumps(BODY).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert until(lambda: silent.heard == ["asked"])
            assert len(node._handoff._disk) == 1
        assert until(lambda: silent.heard == ["asked", "ended"])
        assert until(lambda: len(node._handoff._disk) == 0)


def test_no_request_waits_for_others_before_vllm(node):
    vllm, count = FastAPI(), 101  # more than the connections that httpx opens by itself
    arrived, all_there = [], asyncio.Event()

    @vllm.get("/health")
    async def health():
        arrived.append(1)
        if len(arrived) == count:
            all_there.set()
        await all_there.wait()

    async def ask_all(url):
        transport = httpx.ASGITransport(create_app(node, url))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            asked = asyncio.gather(*(client.get("/health") for _ in range(count)))
            return await asyncio.wait_for(asked, 20)

    with serving(vllm) as url:
        assert {answer.status_code for answer in asyncio.run(ask_all(url))} == {200}
