"""Where modules' KV is kept: tiers, codecs, and the catalog of what text is a module."""

from cached_rag.kv.store.base import KVStore, Problem
from cached_rag.kv.store.catalog import Catalog
from cached_rag.kv.store.codecs import Codec, codec_by_name
from cached_rag.kv.store.disk import DiskStore
from cached_rag.kv.store.memory import MemoryStore
from cached_rag.kv.store.prefetch import Prefetcher
from cached_rag.kv.store.records import ChunkRecord, Maker
from cached_rag.kv.store.tiered import TieredStore

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
