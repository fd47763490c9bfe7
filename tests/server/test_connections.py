"""Clients that let their connections lie, and many of them; descriptors; disk."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from conftest import tiny_model
from doubles import Recording, slow
from served import GREEDY, MESSAGES, connected, received, running, until

from cached_rag import Engine
from cached_rag.server import run
from cached_rag.server.run import default_disk_bytes, share_descriptors

pytestmark = pytest.mark.slow

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model("llama")) as made:
        yield made


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        HEAD + b"{",
        HEAD.replace(b"/v1/completions", b"/health") + b"{",  # is answered, and asked no more
        HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n",
    ],
)
def test_who_sends_half_a_request_is_dropped(engine, sent):
    with (
        running(engine, connections={"client_seconds": 0.1}) as server,
        connected(server.address, sent) as client,
    ):
        assert until(lambda: server.server_state.connections)
        received(client)  # ends, or the socket's own time does
        assert until(lambda: not server.server_state.tasks)
        assert not server.server_state.connections


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\n", HEAD])
def test_sending_a_byte_now_and_then_is_not_enough(engine, begun):
    with (
        running(engine, connections={"client_seconds": 0.1}) as server,
        connected(server.address, begun) as client,
    ):
        assert until(lambda: server.server_state.connections)

        def is_dropped():
            with contextlib.suppress(ConnectionError):
                client.sendall(b"a")
            time.sleep(0.02)
            return not server.server_state.connections

        assert until(is_dropped)


def test_who_does_not_read_is_dropped(engine):
    with running(engine, connections={"client_seconds": 0.1}) as server:
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connected(server.address) as client:

            def ask():
                with contextlib.suppress(OSError):
                    for _ in range(5000):
                        client.sendall(asked)

            asking = threading.Thread(target=ask)
            asking.start()
            assert until(lambda: server.server_state.connections)
            assert until(lambda: not server.server_state.connections)
            client.close()
            asking.join()


def test_who_waits_for_an_answer_and_takes_it_is_not_dropped():
    model = Recording(tiny_model("llama"), slow(0.1))
    model.eos_ids = frozenset()
    with (
        Engine(model) as engine,
        running(engine, connections={"client_seconds": 0.5}) as server,
    ):
        for stream in (True, False):
            body = GREEDY | {"messages": MESSAGES, "max_tokens": 12, "stream": stream}
            body |= {"temperature": 1, "seed": 3}
            url = f"{server.address}/v1/chat/completions"
            got = httpx.post(url, json=body, timeout=60)
            assert got.status_code == 200
            assert "[DONE]" in got.text or got.json()["choices"]


def test_idle_connections_lock_nobody_out():
    """The one that waits longest for its client goes; none that waits for us."""
    may_go = threading.Event()
    with (
        Engine(Recording(tiny_model("llama"), lambda _: may_go.wait(20))) as engine,
        ThreadPoolExecutor(1) as threads,
        running(engine, connections={"max_connections": 8}) as server,
        contextlib.ExitStack() as idle,
    ):
        url = f"{server.address}/v1/chat/completions"
        body = GREEDY | {"messages": MESSAGES}
        waiting = threads.submit(httpx.post, url, json=body, timeout=60)
        assert until(lambda: engine.scheduler.num_running == 1)
        first = idle.enter_context(connected(server.address, b"POST /v1"))
        assert until(lambda: len(server.server_state.connections) == 2)
        for _ in range(30):
            idle.enter_context(connected(server.address, b"POST /v1"))
        assert received(first) == b""
        assert len(server.server_state.connections) <= 8
        assert httpx.get(f"{server.address}/health").status_code == 200
        may_go.set()
        assert waiting.result().status_code == 200


def test_connections_send_what_there_is_at_once(engine):
    with running(engine) as server, connected(server.address):
        assert until(lambda: server.server_state.connections)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_descriptors_are_raised_and_shared_out(monkeypatch):
    resource = pytest.importorskip("resource")
    asked = []

    def share(soft, hard, kernel=1 << 20, connections=1000):
        def setrlimit(_, wanted):
            if wanted[0] > kernel:
                raise ValueError
            asked.append(wanted)

        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", setrlimit)
        return share_descriptors(connections)

    assert share(1024, 4096) == (1000, 320)
    assert asked.pop() == (4096, 4096)
    assert share(1024, 4096, connections=50)[0] == 50
    connections, spaces = share(1024, 1024)
    assert connections + spaces * 6 + 128 <= 1024
    asked.clear()
    assert share(256, resource.RLIM_INFINITY, kernel=10240)[0] == 1000
    assert asked == [(10240, resource.RLIM_INFINITY)]
    assert share(resource.RLIM_INFINITY, resource.RLIM_INFINITY)[1] == 320
    assert min(share(64, 64)) > 0


def test_a_disks_bound_leaves_what_is_there_and_half_of_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert default_disk_bytes(tmp_path / "not" / "yet") == 500
    (tmp_path / "blobs" / "ab").mkdir(parents=True)
    (tmp_path / "blobs" / "ab" / "x.safetensors").write_bytes(b"x" * 300)
    assert default_disk_bytes(tmp_path) == 800


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps what is freed")
def test_freed_memory_goes_back_to_the_system():
    """In a process of its own, for in this one others' tensors lie in between."""
    code = (
        "import torch, psutil; from cached_rag.backends.machine import return_memory\n"
        "kept = [torch.ones(10_000) for _ in range(5000)][::50]\n"  # of 200 MB
        "rss = psutil.Process().memory_info().rss; return_memory()\n"
        "print(rss - psutil.Process().memory_info().rss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100 << 20
