"""Blobs in Redis, or in what speaks its protocol (Valkey, KeyDB, Dragonfly)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cached_rag.errors import ConfigError
from cached_rag.kv.store.remote.transport import SENDING_S, label_of, why_unusable

# Names begin with this, as others may use the same server.
_PREFIX = "cached-rag/"
_MOST_CONNECTIONS = 16


class RedisBlobs:
    """A `Transport`. What the server evicts is a miss: bounds are set there (maxmemory)."""

    errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
    batch = 1000

    def __init__(self, url: str, timeout_s: float) -> None:
        self.label = label_of(url)
        self._client = _client(url, timeout_s, self.label)
        self._sender = _client(url, max(timeout_s, SENDING_S), self.label)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Transport`."""
        found: list[bytes | None] = self._client.mget(_prefixed(names))
        return found

    def has(self, names: Sequence[str]) -> list[bool]:
        """See `Transport`."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in _prefixed(names):
                pipe.exists(name)
            return [bool(count) for count in pipe.execute()]

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


def _client(url: str, timeout_s: float, label: str) -> Any:
    # A connection that the server closed meanwhile is opened again, once.
    again = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=again,
            max_connections=_MOST_CONNECTIONS,
        )
    except ValueError as error:
        reason = why_unusable(url, error)
        raise ConfigError(f"{label} is no address of a Redis server: {reason}") from None


def _prefixed(names: Sequence[str]) -> list[str]:
    return [_PREFIX + name for name in names]
