"""Where modules' KV is kept: tiers, codecs, and the catalog of what text is a module.

A name is imported when it is first used: an index's databases are read without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cached_rag.kv.store.base import KVStore, Problem
    from cached_rag.kv.store.catalog import Catalog
    from cached_rag.kv.store.codecs import Codec, codec_by_name
    from cached_rag.kv.store.disk import DiskStore
    from cached_rag.kv.store.memory import MemoryStore
    from cached_rag.kv.store.prefetch import Prefetcher
    from cached_rag.kv.store.records import ChunkRecord, Maker
    from cached_rag.kv.store.tiered import TieredStore

_MODULES = {
    "Catalog": "catalog",
    "ChunkRecord": "records",
    "Codec": "codecs",
    "DiskStore": "disk",
    "KVStore": "base",
    "Maker": "records",
    "MemoryStore": "memory",
    "Prefetcher": "prefetch",
    "Problem": "base",
    "TieredStore": "tiered",
    "codec_by_name": "codecs",
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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
