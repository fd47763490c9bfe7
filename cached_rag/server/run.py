"""Runs the server until a signal; then lets requests finish, and logs those that do not.

Shares out what of the machine it may use, before. Knows uvicorn.
"""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from cached_rag.backends.machine import return_memory
from cached_rag.errors import ConfigError
from cached_rag.server import ServerConfig
from cached_rag.server.app import create_app
from cached_rag.server.service import Service

_log = logging.getLogger(__name__)
# How long clients have to read the end of a response that was cut off.
_END_SECONDS = 2.0
_TICKS_A_SECOND = 10
_TRIM_SECONDS = 30
# It is the client that has to send something: a request, or the rest of its body.
_SPEAKING = (h11.IDLE, h11.SEND_BODY)
# Descriptors to ask for at least: macOS names no limit, and may grant no more than these.
_WANTED = 10240
# Descriptors for the model's files, the first store's databases, logs, and a few to spare.
_SPARED = 128
# A space (the engine of one tenant or salt) has two databases, of three files each.
_FILES_OF_A_SPACE = 6
_MOST_SPACES = 320


class Connection(H11Protocol):
    """One client's connection, dropped if the client keeps it waiting for too long.

    A client keeps it waiting by not sending a request, or the rest of one, or by not reading what
    it is sent. One connection too many drops the one that has been waiting longest.
    """

    def __init__(self, most: int, **options: Any) -> None:
        """Made by uvicorn for each client.

        Args:
            most: how many connections there may be.
            options: uvicorn's.
        """
        super().__init__(**options)
        self._most = most
        self._seen: tuple[object, ...] = ()
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop; makes room for this connection, if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            waiting = [one for one in _ours(self.connections) if one.is_waiting]
            min(waiting, key=lambda one: one._since).drop()

    @property
    def is_waiting(self) -> bool:
        """Whether the client has something to send or to read."""
        return self.conn.their_state in _SPEAKING or self.transport.get_write_buffer_size() > 0

    def look(self, seconds: float) -> None:
        """Called now and then; drops it if it has waited for so long and nothing has changed."""
        unread = self.transport.get_write_buffer_size()
        seen = (self.cycle, self.conn.their_state, unread)
        if seen != self._seen or not self.is_waiting:
            self._seen, self._since = seen, self.loop.time()
        elif self.loop.time() - self._since > seconds:
            _log.info("a client kept its connection waiting for %g seconds", seconds)
            self.drop()

    def drop(self) -> None:
        """Close it at once; what was not sent yet is lost."""
        self.connections.discard(self)  # uvicorn would do that later
        self.transport.abort()


def _ours(connections: Iterable[object]) -> list[Connection]:
    """Uvicorn's connections, which are all of this class, as such."""
    return [one for one in connections if isinstance(one, Connection)]


class Server(uvicorn.Server):
    """Answers until the first signal; from then on only finishes the requests it has.

    New requests are refused meanwhile (503). Requests that take too long are cut off, and told so.
    """

    def __init__(
        self,
        app: FastAPI,
        drain_seconds: float,
        ready: Callable[[], object] = lambda: None,
        *,
        max_connections: int = 1000,
        client_seconds: float = 60.0,
    ) -> None:
        """A server that does not run yet.

        Args:
            drain_seconds: how long running requests may take after the signal.
            ready: called when it takes requests.
            max_connections: beyond these, those that wait longest for their clients are dropped.
            client_seconds: how long a connection may wait for its client to send a request's head
                or body, or to read on.
        """
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(Connection, max_connections)),
            ws="none",
            log_config=None,  # how a process logs is not a library's to change
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(_END_SECONDS),
        )
        super().__init__(config)
        self._app, self._ready = app, ready
        self._drain_seconds, self._client_seconds = drain_seconds, client_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; begins to listen.

        Raises:
            ConfigError: another program that is bound to the same address was first to listen.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            assert sockets
            host, port, *_ = sockets[0].getsockname()
            raise _refused(host, port, error) from error
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn, ten times a second."""
        often = max(1, int(_TICKS_A_SECOND * min(1.0, self._client_seconds)))
        if counter % often == 0:
            for connection in _ours(self.server_state.connections):
                connection.look(self._client_seconds)
        if counter % (_TICKS_A_SECOND * _TRIM_SECONDS) == 0:
            asyncio.get_running_loop().run_in_executor(None, return_memory)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        if self.should_exit:  # uvicorn would raise every signal again, in the midst of the end
            self.force_exit = self._app.state.is_hurried = True
            return
        self._app.state.is_stopping = True
        count = self._app.state.service.num_open
        _log.warning("stopping; %d requests are finished first", count)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn after the signal, while it still listens."""
        running = set(self.server_state.tasks)
        deadline = time.monotonic() + self._drain_seconds
        while running and time.monotonic() < deadline and not self.force_exit:
            _, running = await asyncio.wait(running, timeout=1 / _TICKS_A_SECOND)
        if running:
            _log.warning("%d requests were still being answered and are cut off", len(running))
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_END_SECONDS)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and the app's end would be a traceback
            await self.lifespan.shutdown()


def serve(
    service: Service,
    config: ServerConfig,
    bound: socket.socket,
    ready: Callable[[str], object],
    at_end: Callable[[], object],
    connections: int,
) -> None:
    """Answer until a signal comes.

    Args:
        bound: what `bind` gave for the settings' host and port.
        ready: called with the address when requests are taken.
        at_end: called when the last one is answered.
        connections: as many as there may be, see `share_descriptors`.

    Raises:
        ConfigError: another program listens there.
    """
    app = create_app(service, config, at_end, max_requests=max(1, connections * 3 // 4))
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"http://{host}:{bound.getsockname()[1]}"
    times = {"max_connections": connections, "client_seconds": config.client_seconds}
    Server(app, config.drain_seconds, partial(ready, address), **times).run(sockets=[bound])


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address and does not listen yet; port 0 takes any free one.

    Raises:
        ConfigError: the address is in use, or this machine does not have it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once only where the protocol is named; else each response waits 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would share a port that is in use
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def _refused(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot listen at {host}, port {port}: {error}; stop what uses it, or choose another "
        "--port or --host (--port 0 takes any that is free)"
    )


def share_descriptors(connections: int) -> tuple[int, int]:
    """Raise this process's limit of open files as far as it may be, and share it out.

    Args:
        connections: how many are wanted; there may be fewer.

    Returns:
        Most connections at once, and most engines of tenants and salts that are open at once.
    """
    half = max(32, (_raise_limit(max(_WANTED, 2 * connections + _SPARED)) - _SPARED) // 2)
    return min(connections, half), min(_MOST_SPACES, half // _FILES_OF_A_SPACE)


def _raise_limit(wanted: int) -> int:
    """Raise the limit; returns how many files may be open now, no more than are wanted."""
    if sys.platform == "win32":  # there is no such limit on sockets
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # the kernel grants less
            return soft
    return most


def default_disk_bytes(folder: Path) -> int:
    """A bound for a store in a folder: what it has now, and half of what the disk has free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    kept = sum(map(_size, folder.glob("blobs/*/*")))
    return kept + max(1, shutil.disk_usage(there).free // 2)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        return path.stat().st_size
    return 0
