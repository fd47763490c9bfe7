"""Connections that cannot be used up: few enough, and none that its client lets lie.

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
# The client has to say more: a request, or the rest of its body.
_SPEAKING = (h11.IDLE, h11.SEND_BODY)


class Connection(H11Protocol):
    """One client's connection, dropped if the client keeps it waiting for too long.

    A client keeps it waiting that owes a request's head or its body, or does not read what it was
    sent. If there are more connections than may be, the one that has waited longest goes.
    """

    def __init__(self, most: int, **options: Any) -> None:
        """A connection.

        Args:
            most: how many there may be.
            options: uvicorn's.
        """
        super().__init__(**options)
        self._most = most
        self._seen: tuple[object, ...] = ()
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            waiting = [one for one in of(self.connections) if one.is_waiting]
            min(waiting, key=lambda one: one._since).drop()

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn."""
        return self.conn.their_state in _SPEAKING or self.transport.get_write_buffer_size() > 0

    def look(self, seconds: float) -> None:
        """Drop it, if nothing has changed in so many seconds; to be called now and then."""
        unread = self.transport.get_write_buffer_size()
        seen = (self.cycle, self.conn.their_state, unread)
        if seen != self._seen or not self.is_waiting:
            self._seen, self._since = seen, self.loop.time()
        elif self.loop.time() - self._since > seconds:
            _log.info("a client kept its connection waiting for %g seconds", seconds)
            self.drop()

    def drop(self) -> None:
        """End it at once; what was not sent yet is lost."""
        self.connections.discard(self)  # which else happens only when the loop comes to it
        self.transport.abort()


def of(connections: Iterable[object]) -> list[Connection]:
    """Those that are of this kind, which all are."""
    return [one for one in connections if isinstance(one, Connection)]
