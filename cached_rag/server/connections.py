"""Connections: bounded in number, and dropped when their clients keep them waiting.

Knows uvicorn's connections; knows no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger(__name__)
# It is the client that has to send something: a request, or the rest of its body.
_SPEAKING = (h11.IDLE, h11.SEND_BODY)


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
