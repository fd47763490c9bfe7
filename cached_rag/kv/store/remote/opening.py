"""Finds what reaches an address. Imports only the package that it needs."""

from __future__ import annotations

from cached_rag.config import StoreConfig
from cached_rag.errors import ConfigError, needs_extra
from cached_rag.kv.store.remote.tier import RemoteTier
from cached_rag.kv.store.remote.transport import Transport, label_of
from cached_rag.kv.store.remote.wire import Sizes

_REDIS = ("redis", "rediss", "unix")
_OBJECTS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")


def open_remote(config: StoreConfig, sizes: Sizes | None = None) -> RemoteTier | None:
    """The remote tier that the settings name; None if they name none.

    Args:
        sizes: the model's, see `RemoteTier`.

    Raises:
        ConfigError, MissingPackageError: see `open_transport`.
    """
    if config.remote is None:
        return None
    wait_s = config.remote_timeout
    transport = open_transport(config.remote, wait_s)
    return RemoteTier(
        transport, config.codec, secret=config.signing_key, timeout_s=wait_s, sizes=sizes
    )


def open_transport(url: str, timeout_s: float) -> Transport:
    """What reaches a URL. Connects when it is first used.

    Args:
        url: redis://, rediss:// or unix:// for Redis and what speaks like it; s3://, gs://, az://,
            http(s):// or file:// for an object store.
        timeout_s: how long a single step on the network may take.

    Raises:
        ConfigError: no such kind of URL.
        MissingPackageError: the extra that it needs is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme in _REDIS:
        with needs_extra("redis", "a remote store in Redis"):
            from cached_rag.kv.store.remote.redis_blobs import RedisBlobs
        return RedisBlobs(url, timeout_s)
    if scheme in _OBJECTS:
        with needs_extra("s3", "a remote store of objects"):
            from cached_rag.kv.store.remote.object_blobs import ObjectBlobs
        return ObjectBlobs(url, timeout_s)
    known = ", ".join(f"{name}://" for name in (*_REDIS, *_OBJECTS))
    raise ConfigError(f"{label_of(url)!r} is no address of a remote store; known are {known}")
