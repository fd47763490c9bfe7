"""Modules in a host's or device's memory, bounded by bytes; the least recently used leave first.

Knows no file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from cachetools import LRUCache

from cached_rag.errors import CorruptBlobError, StoreFullError
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store.base import IsWanted, Problem


class MemoryStore:
    """A `KVStore` of at most `max_bytes` bytes of keys and values.

    Args:
        device: where to keep modules; None leaves them where they are. With "cpu" on a machine
            with CUDA their memory is pinned, so that copies to the device run by themselves.
    """

    def __init__(self, max_bytes: int, device: torch.device | None = None) -> None:
        self.max_bytes, self.device = max_bytes, device
        self._entries: LRUCache[str, ModuleKV] = LRUCache(max_bytes, getsizeof=lambda kv: kv.nbytes)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return int(self._entries.currsize)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is held."""
        with self._lock:
            return sum(kv.seq_len for kv in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> Iterator[str]:
        """All keys, least recently used first."""
        with self._lock:
            return iter(list(self._entries))

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """See `KVStore.get`."""
        with self._lock:
            found: ModuleKV | None = self._entries.get(key)
            if found is not None and found.token_ids != tuple(token_ids):
                del self._entries[key]
                raise CorruptBlobError(f"the entry {key} in memory belongs to other tokens.")
            return found

    def open(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """As `get`: all layers are there."""
        return self.get(key, token_ids)

    def put(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """See `KVStore.put`. If the tensors are views of larger ones, they are copied."""
        if kv.nbytes > self.max_bytes:
            raise StoreFullError(
                f"a module of {kv.nbytes} bytes exceeds the memory bound of {self.max_bytes}; "
                "raise memory_bytes or use smaller chunks"
            )
        kept = _at(_compact(kv), self.device)
        with self._lock:
            if wanted():
                self._entries[key] = kept

    def delete(self, key: str) -> bool:
        """Delete an entry; says whether it was there."""
        with self._lock:
            return self._entries.pop(key, None) is not None

    def check(self) -> list[Problem]:
        """Nothing can go wrong in memory."""
        return []


def _compact(kv: ModuleKV) -> ModuleKV:
    """The module in tensors of its own, if its own were views of larger ones."""
    tensors = [
        tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for tensor in (kv.keys, kv.values)
    ]
    return ModuleKV(kv.token_ids, kv.start, *tensors)


def _at(kv: ModuleKV, device: torch.device | None) -> ModuleKV:
    """The module on a device; the same object if it is there already."""
    if device is None:
        return kv
    tensors = [tensor.to(device) for tensor in (kv.keys, kv.values)]
    if device.type == "cpu" and torch.cuda.is_available():
        tensors = [tensor.pin_memory() for tensor in tensors]
    if tensors[0] is kv.keys and tensors[1] is kv.values:
        return kv
    return ModuleKV(kv.token_ids, kv.start, *tensors)
