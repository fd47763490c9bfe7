"""A server on a port of its own, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time

from conftest import CHUNKS

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.server import ServerConfig
from cached_rag.server.app import create_app
from cached_rag.server.run import Server, bind
from cached_rag.server.service import Service

NAME = "tiny"
MESSAGES = [
    {"role": "system", "content": "Answer from the texts."},
    {"role": "user", "content": f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWhy is it green?"},
]
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 8}


@contextlib.contextmanager
def serving(engine, keys=(), drain=5, **limits):
    """Yields its address and the service."""
    with running(engine, keys, drain, **limits) as server:
        yield server.address, server.config.app.state.service


@contextlib.contextmanager
def running(
    engine,
    keys=(),
    drain=5,
    connections=None,
    spaces=320,
    index=None,
    max_requests=750,
    **listening,
):
    """Yields the server; `address` is where."""
    service = Service(engine, NAME, max_spaces=spaces, index=index)
    config = ServerConfig(api_key=tuple(keys), **listening)
    app = create_app(service, config, max_requests=max_requests)
    bound = bind("127.0.0.1", 0)
    server = Server(app, drain, **(connections or {}))
    server.address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    work = server.serve(sockets=[bound])
    thread = threading.Thread(target=lambda: asyncio.run(work), daemon=True)
    thread.start()
    assert until(lambda: server.started)
    try:
        yield server
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(30)
        assert not thread.is_alive()


def until(condition, seconds=20):
    """Wait for it; what it was at last."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def reads(monkeypatch, most=100_000):
    """Texts that are tokenised from now on; longer ones than `most` are known not to fit."""
    tokenize, found = Tokenization.tokenize, []

    def recording(tokenization, rendered):
        found.append(rendered.text)
        return tokenize(tokenization, rendered)

    monkeypatch.setattr(Tokenization, "tokenize", recording)
    bound = staticmethod(lambda text, room: len(text) if len(text) > most else None)
    monkeypatch.setattr(Tokenization, "least_tokens", bound)
    return found


def connected(address, sent=b""):
    """A socket that has sent this; whoever reads from it waits for half a minute at most."""
    host, port = address.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=30)
    found.sendall(sent)
    return found


def received(connection):
    """All that comes until the other side ends it, somehow."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found
