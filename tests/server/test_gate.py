"""Who is let in, before anything of a body is read, and what others learn of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import CHUNKS, tiny_model
from served import GREEDY, MESSAGES, NAME, connected, received, serving, until

from cached_rag import ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.errors import BusyError, StoreError, StoreFullError
from cached_rag.server.gate import Keys
from cached_rag.server.protocol import CompletionRequest
from cached_rag.server.service import Service
from cached_rag.server.tenants import Documents, Tenants

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model("llama")) as made:
        yield made


def head(path="/v1/completions", key="wrong", length="Content-Length: 100000", host="localhost"):
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("length", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
def test_who_has_no_key_is_refused_before_the_body_is_sent(engine, length):
    with serving(engine, ["secret"]) as (address, _):
        with connected(address, head(length=length)) as client:
            answer = received(client)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"invalid_api_key" in answer
        with connected(address, head(key="secret", length=f"Content-Length: {1 << 30}")) as client:
            assert received(client).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_length_is_read_up_to_the_bound_and_no_further(engine):
    with serving(engine, max_body_bytes=5000) as (address, _):
        piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        sent = head(length="Transfer-Encoding: chunked") + 6 * piece
        with connected(address, sent) as client:  # and there is no end of it
            assert received(client).startswith(b"HTTP/1.1 413 ")


def test_who_still_sends_sees_why_it_is_refused(engine):
    """The system would break the connection if it were closed while something is unread."""
    with serving(engine, ["secret"], max_body_bytes=5000) as (address, _):
        for key, status in (("secret", 413), ("wrong", 401)):
            sent = head(key=key, length=f"Content-Length: {8 << 20}") + b" " * (8 << 20)
            with connected(address, sent) as client:
                assert received(client).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("wrong", [{"max_tokens": 10**6}, {"top_p": 2}, {"model": "other"}])
def test_who_is_let_in_and_asks_wrongly_keeps_its_connection(engine, wrong):
    with serving(engine) as (address, _):
        asked = {"model": NAME, "messages": MESSAGES} | wrong
        got = httpx.post(f"{address}/v1/chat/completions", json=asked)
    assert got.status_code in (400, 404)
    assert "connection" not in got.headers


def test_half_sent_bodies_keep_nobody_out(engine, monkeypatch):
    """Those that have been coming for longest are given up."""
    monkeypatch.setattr("cached_rag.server.gate.MAX_BODIES", 2)
    half_sent = head(length="Content-Length: 1000") + b" " * 999
    with (
        serving(engine, max_body_bytes=1000, max_requests=1) as (address, _),
        connected(address, half_sent) as first,
        connected(address, half_sent) as second,
    ):
        first.settimeout(0.05)

        def is_given_up():
            body = GREEDY | {"prompt": "x"}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
            with contextlib.suppress(TimeoutError):
                return first.recv(1000).startswith(b"HTTP/1.1 429 ")

        assert until(is_given_up)
        second.sendall(b" ")
        assert second.recv(1000).startswith(b"HTTP/1.1 400 ")  # which was waited for


def test_only_so_many_requests_are_under_way(engine, monkeypatch):
    is_under_way, is_free = threading.Event(), threading.Event()

    async def answer(*_):
        is_under_way.set()
        while not is_free.is_set():
            await asyncio.sleep(0.01)
        return {}

    monkeypatch.setattr(Documents, "encode", answer)
    with ThreadPoolExecutor(1) as threads, serving(engine, max_requests=1) as (address, _):
        url, body = f"{address}/v1/documents", {"texts": ["x"]}
        first = threads.submit(httpx.post, url, json=body, timeout=60)
        assert is_under_way.wait(20)
        refused = httpx.post(url, json=body)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{address}/health").status_code == 200
        is_free.set()
        assert first.result().status_code == 200
        assert httpx.post(url, json=body).status_code == 200


def test_a_foreign_host_is_refused_where_only_this_machine_may_ask(engine):
    with serving(engine, allowed_host=("mine.example",)) as (address, _):
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json"):
            for host, status in {
                "evil.example": 421,
                "evil.example:8000": 421,
                "localhost.evil.example": 421,
                "[::1": 421,
                "": 421,
                "localhost": 200,
                "LOCALHOST:8000": 200,
                "127.0.0.1:1": 200,
                "[::1]:8000": 200,
                "mine.example:80": 200,
            }.items():
                got = httpx.get(f"{address}{path}", headers={"Host": host})
                assert got.status_code == status, host
        with connected(address, head(host="evil.example")) as client:
            assert received(client).startswith(b"HTTP/1.1 421 ")
    with serving(engine, host="0.0.0.0", no_keys=True) as (address, _):
        assert httpx.get(f"{address}/health", headers={"Host": "any"}).status_code == 200


def test_with_keys_nothing_but_health_is_open(engine):
    with serving(engine, ["red:secret", "plain"]) as (address, _):
        for path in ("/docs", "/redoc", "/openapi.json", "/metrics", "/v1/models", "/nothing"):
            assert httpx.get(f"{address}{path}").status_code == 401, path
        assert httpx.get(f"{address}/health").status_code == 200
        statuses = {
            key: httpx.get(f"{address}/metrics", headers={"Authorization": f"Bearer {key}"})
            for key in ("secret", "plain")
        }
        assert statuses["secret"].status_code == 403
        assert statuses["plain"].status_code == 200


@pytest.mark.parametrize(
    "key", [":k", "", ":", "red:", "red::k", "a:b:k", " ", "red: k", "a b:k", "k\n"]
)
def test_keys_that_are_not_whole_are_refused(key):
    """ "$TENANT:$KEY" with an empty TENANT would be the owner's."""
    with pytest.raises(ConfigError, match="neither of them empty"):
        Keys(["good", key])


def test_a_key_that_two_have_is_refused():
    for keys in (["red:k", "blue:k"], ["k", "red:k"]):
        with pytest.raises(ConfigError, match="two tenants have the same API key"):
            Keys(keys)
    assert Keys(["red:k", "red:k", "red:other"]).tenant("Bearer k") == "red"


UNCLEAR = {
    "a length and chunks": ["Content-Length: 5", "Transfer-Encoding: chunked"],
    "chunks and a length": ["transfer-encoding: Chunked", "content-length: 0"],
    "two lengths": ["Content-Length: 5", "Content-Length: 6"],
    "a negative length": ["Content-Length: -5"],
    "a length with a sign": ["Content-Length: +5"],
    "a length on two lines": ["Content-Length: 5", " 6"],
    "another encoding": ["Transfer-Encoding: gzip"],
    "two encodings": ["Transfer-Encoding: gzip, chunked"],
    "a name with a blank": ["Transfer-Encoding : chunked"],
}


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
@pytest.mark.parametrize("lines", UNCLEAR.values(), ids=UNCLEAR)
def test_a_body_whose_end_is_unclear_is_refused_and_nothing_behind_it_is_read(engine, lines, path):
    smuggled = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        serving(engine) as (address, _),
        connected(address, head(path, length="\r\n".join(lines)) + smuggled) as client,
    ):
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.lower().count(b"connection: close") == answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("size", [b"-1", b"0x5", b"+5", b"f" * 30, b"", b"5 5", b"5\x00"])
def test_a_chunk_of_no_clear_size_ends_the_connection(engine, size):
    sent = head(length="Transfer-Encoding: chunked") + size + b"\r\n{}   \r\n0\r\n\r\n"
    with serving(engine) as (address, _), connected(address, sent + sent) as client:
        assert received(client).count(b"HTTP/1.1 ") <= 1


def test_chunks_in_http_1_0_are_refused(engine):
    sent = head(length="Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0")
    with serving(engine) as (address, _), connected(address, sent + b"0\r\n\r\n") as client:
        assert received(client).startswith(b"HTTP/1.1 400 ")


def test_a_model_is_called_by_its_own_name_and_not_where_it_lies(engine, tmp_path):
    def name(given):
        return Service(Engine(dataclasses.replace(engine.model, name=given))).name

    folder = tmp_path / "private" / "my-model"
    folder.mkdir(parents=True)
    (folder / "small.gguf").touch()
    assert name(str(folder)) == name(f"{folder}/") == "my-model"
    assert name(str(folder / "small.gguf")) == "small.gguf"
    assert name("someone/some-model") == "someone/some-model"
    assert Service(engine, "given").name == "given"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreError("/secret/index is damaged"), 500),
        (StoreFullError("no room in /secret"), 507),
        (OSError(24, "too many open files", "/secret"), 500),
    ],
)
def test_what_breaks_is_told_to_the_log_and_not_to_clients(
    engine, monkeypatch, caplog, error, status
):
    async def broken(*_):
        raise error
        yield

    async def answer(*_):
        raise error

    monkeypatch.setattr(Service, "chunks", broken)
    monkeypatch.setattr(Service, "answer", answer)
    monkeypatch.setattr(Documents, "encode", answer)
    with serving(engine) as (address, _):
        asked = GREEDY | {"messages": MESSAGES}
        for path, body in (
            ("chat/completions", asked),
            ("chat/completions", asked | {"stream": True}),
            ("documents", {"texts": ["x"]}),
        ):
            got = httpx.post(f"{address}/v1/{path}", json=body)
            assert got.status_code == status
            assert "secret" not in got.text
            name = re.search(r"error (\w{12})", got.text).group(1)
            assert any(name in line.getMessage() for line in caplog.records)
    assert "/secret" in caplog.text


def test_what_breaks_in_a_stream_is_told_to_the_log_too(engine, monkeypatch, caplog):
    async def broken(*_):
        yield {"a": "chunk"}
        raise StoreError("/secret/index is damaged")

    monkeypatch.setattr(Service, "chunks", broken)
    with serving(engine) as (address, _):
        body = GREEDY | {"messages": MESSAGES, "stream": True}
        got = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert "secret" not in got.text
    last = json.loads(got.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert "/secret" in caplog.text


def test_a_full_store_is_said_without_its_folder(tmp_path):
    with (
        Engine(tiny_model("llama"), StoreConfig(str(tmp_path), disk_bytes=100)) as engine,
        serving(engine) as (address, _),
    ):
        got = httpx.post(f"{address}/v1/documents", json={"texts": list(CHUNKS)}, timeout=60)
        assert got.status_code == 507
        assert got.json()["error"]["code"] == "store_full"
        assert str(tmp_path) not in got.text


def test_tenants_and_salts_in_use_are_bounded(tmp_path):
    with Engine(tiny_model("llama"), StoreConfig(str(tmp_path))) as engine:
        tenants = Tenants(engine, most=8)  # so 4 in use, 2 of them by salts of one tenant
        with tenants.using("a", "1"), tenants.using("a", "2"):
            with pytest.raises(BusyError, match="salts"), tenants.using("a", "3"):
                pass
            with tenants.using("a", "1"), tenants.using("a", None), tenants.using("b", "1"):
                with pytest.raises(BusyError, match="tenants"), tenants.using("c", None):
                    pass
                with tenants.using("", None) as first:
                    assert first is engine
        with tenants.using("a", "3"), tenants.using("c", None):
            pass
        tenants.close()
        assert not tenants._num_closing


def test_who_finds_too_many_salts_in_use_is_told_to_come_again(tmp_path):
    with (
        Engine(tiny_model("llama"), StoreConfig(str(tmp_path))) as engine,
        serving(engine, spaces=4) as (address, service),
    ):
        body = GREEDY | {"prompt": "x", "cache_salt": "mine"}
        with service.tenants.using("", "another's"):
            got = httpx.post(f"{address}/v1/completions", json=body)
            assert (got.status_code, got.headers["retry-after"]) == (429, "1")
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200


def test_who_reads_slowly_has_few_chunks_made_ahead():
    made = []
    engine = Engine(dataclasses.replace(tiny_model("llama"), eos_ids=frozenset()))
    service = Service(engine)
    prompts = [f"{CHUNKS[0]} {n}" for n in range(2)]
    request = CompletionRequest(**GREEDY | {"prompt": prompts, "max_tokens": 200})

    async def read_slowly():
        asked = service.ask(request, "")
        piece = asked.envelope.piece
        object.__setattr__(asked.envelope, "piece", lambda *a: made.append(a) or piece(*a))
        chunks = service.chunks(asked)
        await anext(chunks)
        while engine.scheduler.num_running + engine.scheduler.num_waiting:
            await asyncio.sleep(0.01)
        return len(made), len([chunk async for chunk in chunks])

    ahead, rest = asyncio.run(read_slowly())
    assert ahead < 30 < rest
    service.close()
    engine.close()


def test_repetition_penalties_that_overflow_are_refused():
    for penalty in (1e-308, 1e308, float("inf"), float("nan"), 0.0, -1.0):
        with pytest.raises(ConfigError, match="repetition_penalty"):
            GenerationConfig(repetition_penalty=penalty)
    assert GenerationConfig(repetition_penalty=1.3).repetition_penalty == 1.3
