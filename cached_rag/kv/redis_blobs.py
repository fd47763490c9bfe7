"""Blobs in Redis, or in what speaks its protocol (Valkey, KeyDB, Dragonfly)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cached_rag.errors import ConfigError
from cached_rag.kv.transport import SENDING_S, label_of, why_unusable

# Names begin with this, as others may use the same server.
_PREFIX = "cached-rag/"
_MOST_CONNECTIONS = 16
# Most bytes of a reply that has no blobs in it, and of what stands around each blob in others.
_SMALL, _AROUND = 1 << 20, 64
# How many bytes the reply to what this thread sends next may have.
_expected = threading.local()


class _Bounded:
    """A socket that gives up on a reply with more bytes than expected, or one without an end."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._left, self._until = socket, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: Any) -> None:
        self._left = getattr(_expected, "nbytes", _SMALL)
        self._until = time.monotonic() + SENDING_S
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        data: bytes = self._socket.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        count: int = self._socket.recv_into(*args)
        self._count(count)
        return count

    def _count(self, received: int) -> None:
        self._left -= received
        if self._left < 0 or time.monotonic() > self._until:
            raise OSError("its reply has more bytes than were asked for, or does not end")


class _BoundedConnection:
    """Put before a class of redis-py's connections."""

    def _connect(self) -> Any:
        return _Bounded(super()._connect())  # type: ignore[misc]


class RedisBlobs:
    """A `Transport`. What the server evicts is a miss: bounds are set there (maxmemory)."""

    batch = 1000

    def __init__(self, url: str, timeout_s: float) -> None:
        self.label = label_of(url)
        self._client = _client(url, timeout_s)
        self._sender = _client(url, max(timeout_s, SENDING_S))

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """See `Transport`."""
        _expected.nbytes = sum(most_bytes) + _AROUND * len(names) + _SMALL
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for name, most in zip(_prefixed(names), most_bytes, strict=True):
                    pipe.getrange(name, 0, most - 1)
                found = _replies(pipe, bytes, len(names))
        finally:
            del _expected.nbytes
        return [data or None for data in found]  # it says nothing of what it does not have

    def has(self, names: Sequence[str]) -> list[bool]:
        """See `Transport`."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in _prefixed(names):
                pipe.exists(name)
            return [bool(count) for count in _replies(pipe, int, len(names))]

    def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        self._sender.set(_PREFIX + name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See `Transport`."""
        self._client.unlink(*_prefixed(names))

    def close(self) -> None:
        """See `Transport`."""
        self._client.close()
        self._sender.close()


def _replies(pipe: Any, kind: type, count: int) -> list[Any]:
    """What a pipeline comes to.

    Raises:
        OSError: it is not so many replies of this kind.
    """
    found = pipe.execute()
    if not (isinstance(found, list) and [type(one) for one in found] == [kind] * count):
        raise OSError("its reply is none to what it was asked")
    return found


def _client(url: str, timeout_s: float) -> Any:
    # A connection that the server closed meanwhile is opened again, once.
    again = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=again,
            max_connections=_MOST_CONNECTIONS,
        )
    except ValueError as error:
        reason = why_unusable(url, error)
        raise ConfigError(f"{label_of(url)} is no address of a Redis server: {reason}") from None
    pool = client.connection_pool
    pool.connection_class = type("Bounded", (_BoundedConnection, pool.connection_class), {})
    return client


def _prefixed(names: Sequence[str]) -> list[str]:
    return [_PREFIX + name for name in names]
