"""KV on another machine: the tier below the disk, that several machines share."""

from cached_rag.kv.store.remote.opening import open_remote, open_transport
from cached_rag.kv.store.remote.tier import Brought, RemoteTier
from cached_rag.kv.store.remote.transport import Transport

__all__ = ["Brought", "RemoteTier", "Transport", "open_remote", "open_transport"]
