"""Where modules are kept: what every store promises, memory, and fast stores before slow ones.

Knows no file format and no model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from cachetools import LRUCache

from cached_rag.errors import ConfigError, CorruptBlobError, StoreFullError
from cached_rag.kv.blob import SigningError
from cached_rag.kv.buffer import LayerSource, ModuleKV
from cached_rag.kv.layers import each

_T = TypeVar("_T")
# Says, when KV is about to be kept, whether it still is to be: its text may be deleted by now.
IsWanted = Callable[[], bool]


class KVStore(Protocol):
    """Modules' KV by key. Every method may be called from several threads.

    Keys come from `fingerprint.module_key`. A store compares the stored token ids with the wanted
    ones, so that even two equal keys could not make it serve the wrong KV.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module, or None if it is not held. The caller must not write into its tensors.

        Raises:
            CorruptBlobError: held, but damaged or with other token ids; the entry is gone then.
        """
        ...

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but a module on disk is not read: each layer is when it is asked for."""
        ...

    def put(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Keep a module; replaces an entry of the same key; may evict others, least recent first.

        Args:
            wanted: called when no `delete` can come in between; nothing is kept if it says no. So
                a text that is forgotten first, and whose KV is deleted then, leaves none, even if
                this process is killed.

        Raises:
            StoreFullError: it does not fit; nothing is changed.
        """
        ...

    def delete(self, key: str) -> bool:
        """Delete an entry; says whether it was there."""
        ...


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
        keys, values = (each(side, self._kept) for side in (kv.keys, kv.values))
        kept = ModuleKV(kv.token_ids, kv.start, keys, values)
        with self._lock:
            if wanted():
                self._entries[key] = kept

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the store is, that holds no larger one of which it was a view."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        if self.device is None:
            return tensor
        tensor = tensor.to(self.device)
        pins = self.device.type == "cpu" and torch.cuda.is_available()
        return tensor.pin_memory() if pins else tensor

    def delete(self, key: str) -> bool:
        """Delete an entry; says whether it was there."""
        with self._lock:
            return self._entries.pop(key, None) is not None


class TieredStore:
    """A `KVStore` over several, fastest first. The last one has all that the others have."""

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("a tiered store needs at least one tier")
        self.tiers = tuple(tiers)

    @property
    def nbytes(self) -> int:
        """Bytes in the last tier."""
        return self.tiers[-1].nbytes

    def __contains__(self, key: str) -> bool:
        return any(key in tier for tier in self.tiers)

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module from the fastest tier that has it, which is copied into the faster ones.

        Raises:
            CorruptBlobError: damaged in one tier, and in no other.
        """
        level, kv = self._first(lambda tier: tier.get(key, token_ids))
        if kv is None or not level:
            return kv
        self._keep(level, key, kv)
        return self.tiers[0].get(key, token_ids) or kv  # on its device

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but unread, and left where it is."""
        _, source = self._first(lambda tier: tier.open(key, token_ids))
        return source

    def _first(self, read: Callable[[KVStore], _T | None]) -> tuple[int, _T | None]:
        """The number of the first tier that has something, and what it has."""
        damage: CorruptBlobError | None = None
        for level, tier in enumerate(self.tiers):
            try:
                found = read(tier)
            except CorruptBlobError as error:
                damage = error
                continue
            if found is not None:
                return level, found
        if damage is not None:
            raise damage
        return 0, None

    def put(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Keep a module in the last tier, and in the faster ones if it fits.

        In these alone, if the last one has it from others and signed, as this process cannot.
        """
        level = len(self.tiers) - 1
        try:
            self.tiers[-1].put(key, kv, wanted)
        except SigningError:
            if not level:
                raise
            self._keep(level, key, kv, wanted)
        else:
            self._keep(level, key, kv)

    def delete(self, key: str) -> bool:
        """Delete an entry from all tiers; says whether any had it.

        From the slowest first: a reader could copy it from there back into the others.
        """
        return sum(tier.delete(key) for tier in reversed(self.tiers)) > 0

    def _keep(self, level: int, key: str, kv: ModuleKV, wanted: IsWanted | None = None) -> None:
        """Put what tier `level` has into the faster ones, unless it is deleted meanwhile.

        Args:
            wanted: says whether it is, where tier `level` does not have it.
        """
        for tier in self.tiers[:level]:
            with contextlib.suppress(StoreFullError):  # too large for a fast tier is no error
                tier.put(key, kv)
        is_wanted = key in self.tiers[level] if wanted is None else wanted()
        if level and not is_wanted:
            for tier in self.tiers[:level]:
                tier.delete(key)
