"""How much of the machine a server may use: files, memory, disk, and connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Descriptors to ask for, the larger number first: some systems name a limit and grant less.
_WANTED = (65536, 10240)
# Descriptors for the model's files, the first store's databases, logs, and a few to spare.
_SPARED = 128
# A space (the engine of one tenant or salt) has two databases, of three files each.
_FILES_OF_A_SPACE = 6
_MOST_SPACES = 320

_log = logging.getLogger(__name__)
# It is the client that has to send something: a request, or the rest of its body.
_SPEAKING = (h11.IDLE, h11.SEND_BODY)


@dataclass(frozen=True)
class Share:
    """How many descriptors are used for what.

    Attributes:
        connections: most connections at once.
        spaces: most engines of tenants and salts that are open at once.
    """

    connections: int
    spaces: int


def share_descriptors(connections: int) -> Share:
    """Raise this process's limit of open files as far as it may be, and share it out.

    Args:
        connections: how many are wanted; there may be fewer.
    """
    half = max(32, (_raise_limit() - _SPARED) // 2)
    return Share(min(connections, half), min(_MOST_SPACES, half // _FILES_OF_A_SPACE))


def _raise_limit() -> int:
    """Raise the limit; returns how many files may be open now."""
    if sys.platform == "win32":  # there is no such limit on sockets
        return _WANTED[0]
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(OSError, ValueError):  # the kernel grants less
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
    return _WANTED[0] if soft == resource.RLIM_INFINITY else soft


def default_disk_bytes(folder: Path) -> int:
    """A bound for a store in a folder: what it has now, and half of what the disk has free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    kept = sum(map(_size, folder.glob("blobs/*/*")))
    return kept + max(1, shutil.disk_usage(there).free // 2)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        return path.stat().st_size
    return 0


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
            waiting = [one for one in of(self.connections) if one.is_waiting]
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


def of(connections: Iterable[object]) -> list[Connection]:
    """Uvicorn's connections, which are all of this class, as such."""
    return [one for one in connections if isinstance(one, Connection)]
