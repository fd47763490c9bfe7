"""Where modules' KV is kept: tiers, codecs, and the catalog of what text is a module.

A name is imported when it is first used: an index's databases are read without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cached_rag.lazily import imports_from

if TYPE_CHECKING:
    from cached_rag.kv.store.base import KVStore, Problem
    from cached_rag.kv.store.catalog import Catalog
    from cached_rag.kv.store.codecs import Codec, codec_by_name
    from cached_rag.kv.store.disk import DiskStore
    from cached_rag.kv.store.memory import MemoryStore
    from cached_rag.kv.store.prefetch import Prefetcher
    from cached_rag.kv.store.records import ChunkRecord, Maker
    from cached_rag.kv.store.tiered import TieredStore

_PLACES = {
    "base": (
        "KVStore",
        "Problem",
    ),
    "catalog": ("Catalog",),
    "codecs": (
        "Codec",
        "codec_by_name",
    ),
    "disk": ("DiskStore",),
    "memory": ("MemoryStore",),
    "prefetch": ("Prefetcher",),
    "records": (
        "ChunkRecord",
        "Maker",
    ),
    "tiered": ("TieredStore",),
}

__all__ = [
    "Catalog",
    "Codec",
    "DiskStore",
    "KVStore",
    "Maker",
    "MemoryStore",
    "ChunkRecord",
    "Prefetcher",
    "Problem",
    "TieredStore",
    "codec_by_name",
]

__getattr__ = imports_from(_PLACES, __name__, __name__)
