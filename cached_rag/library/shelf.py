"""Where one tenant's KV is, by what it was encoded behind: in memory, on disk, on another machine.

Knows keys and tiers; knows no text. Of the model it knows only the fingerprint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from cachetools import LRUCache

from cached_rag.config import StoreConfig
from cached_rag.errors import StoreError, StoreFullError
from cached_rag.kv.fingerprint import module_key
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.store.background import Outbox, Prefetcher
from cached_rag.kv.store.catalog import Maker
from cached_rag.kv.store.disk import DiskStore
from cached_rag.kv.store.remote.tier import RemoteTier
from cached_rag.kv.store.tiers import IsWanted, KVStore, MemoryStore, TieredStore
from cached_rag.library.matching import EncodedAfter

_log = logging.getLogger(__name__)
# Of how many modules that were brought into memory ahead it is remembered where they came from.
_AHEAD = 4096
# Most bytes from the remote tier that wait to be written to disk, and how long closing waits.
_TO_DISK_BYTES, _WRITING_S = 256 << 20, 10.0
# What was encoded, and behind what.
Source = tuple[EncodedAfter, tuple[int, ...]]


@dataclass(frozen=True)
class Origin:
    """Where KV came from.

    Attributes:
        tier: "memory", "disk", "ahead" (from disk, by `prefetch`), "remote" (from another machine),
            "kept" (what a prompt computed that begins alike), "harvest" (what a prompt computed
            that contains it) or "new" (encoded for this prompt).
        load_ms: milliseconds that fetching it took, or waiting for what is read ahead; None if it
            was not fetched by itself.
    """

    tier: str
    load_ms: float | None = None


KEPT = Origin("kept")


class Shelf:
    """The KV of one model and one tenant. Safe for several threads.

    Attributes:
        memory: the tiers in memory, fastest first.
        disk: the tier on disk; None if there is none.
        store: memory and disk as one.
        remote: the tier on another machine; None if there is none.
    """

    def __init__(
        self,
        maker: Maker,
        namespace: str,
        memory: Sequence[MemoryStore],
        disk: DiskStore | None,
        remote: RemoteTier | None,
    ) -> None:
        """Put tiers together that are open."""
        self.maker, self.fingerprint, self.namespace = maker, maker.model, namespace
        self.memory, self.disk, self.remote = tuple(memory), disk, remote
        tiers: list[KVStore] = [*self.memory, *([] if disk is None else [disk])]
        self.store: KVStore = TieredStore(tiers) if len(tiers) > 1 else tiers[0]
        self._prefetcher = Prefetcher()
        self._to_disk = Outbox(self._write, _TO_DISK_BYTES)
        self._deletions = 0
        self._ahead: LRUCache[str, str] = LRUCache(_AHEAD)
        self._noting = threading.Lock()
        self._told: set[str] = set()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Log a `StoreError` instead of raising it, for a question can be answered without a cache.

        The same message is logged once only.
        """
        try:
            yield
        except StoreError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("KV is computed anew, because the cache failed: %s", error)

    def key(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The key under which the store has the KV of these tokens, encoded behind that."""
        return module_key(
            self.fingerprint, behind.prefix_ids, token_ids, self.namespace, behind.context
        )

    def holds(self, behind: EncodedAfter, token_ids: Sequence[int]) -> bool:
        """Whether KV of these tokens, encoded behind that, is on this machine.

        False if the store fails.
        """
        with self.spared():
            return self.key(behind, token_ids) in self.store
        return False

    def keep(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Put KV into all tiers; into the remote one in the background.

        Args:
            wanted: see `KVStore.put` and `RemoteTier.offer`.

        Raises:
            StoreFullError: there is no room on this machine.
        """
        self.store.put(key, kv, wanted)
        if self.remote is not None:
            self.remote.offer(self.namespace, key, kv, wanted)

    @property
    def deletions(self) -> object:
        """Changes whenever KV is deleted because its text is forgotten."""
        return self._deletions

    def take_over(self, found: Mapping[str, ModuleKV], deletions: object) -> None:
        """Put KV from the remote tier into the others: into memory now, on disk in a while.

        Args:
            found: by its keys.
            deletions: as it was before the remote tier was asked. If it has changed since then, the
                KV may have been deleted meanwhile, and is not kept.
        """

        def wanted() -> bool:
            return deletions == self.deletions

        for key, kv in found.items():
            for tier in self.memory:
                with suppress(StoreFullError):  # too large for a fast tier is no error
                    tier.put(key, kv)
            self._came_from(key, "remote")
            if self.disk is not None:
                self._to_disk.add(key, kv, wanted)
        if not wanted():
            self._to_disk.drop(found)
            for key in found:
                self.store.delete(key)

    def _write(self, key: str, kv: ModuleKV, wanted: IsWanted) -> bool:
        assert self.disk is not None
        with self.spared():
            if any(key in tier for tier in self.memory):  # else it was deleted, or is too large
                self.disk.put(key, kv, wanted)
        return True

    def delete(self, key: str) -> bool:
        """Delete KV from this machine; says whether there was any."""
        self._to_disk.drop([key])
        return self.store.delete(key)

    def delete_far(self, keys: Sequence[str]) -> None:
        """Delete KV from the remote tier, if there is one.

        Raises:
            StoreError: it may still be there.
        """
        if self.remote is not None:
            self.remote.delete(self.namespace, keys)

    def memory_bytes(self) -> int:
        """Bytes of KV in memory: the host's and a CUDA device's together."""
        return sum(tier.nbytes for tier in self.memory)

    def store_bytes(self) -> int:
        """Bytes of KV in this machine's slowest tier; 0 if its index cannot be read (logged)."""
        with self.spared():
            return self.store.nbytes
        return 0

    def memory_tokens(self) -> int:
        """Number of tokens whose KV is in memory; a token in two tiers counts twice."""
        return sum(tier.num_tokens for tier in self.memory)

    def fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        """KV of these tokens; None if there is none, or it cannot be read (which is logged).

        If `read_ahead` is reading it already, this waits for that.
        """
        return self._fetch(self.key(behind, token_ids), token_ids)

    def _fetch(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        self._prefetcher.wait((key,))
        self._to_disk.settle(key)
        return self._got(key, token_ids)

    def _got(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        with self.spared():
            return self.store.get(key, token_ids)
        return None

    def open(self, behind: EncodedAfter, token_ids: Sequence[int]) -> LayerSource | None:
        """As `fetch`, but KV on disk is only opened, and read layer by layer when it is used."""
        return self._open(self.key(behind, token_ids), token_ids)

    def _open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        with self.spared():
            return self.store.open(key, token_ids)
        return None

    def read_ahead(self, source: Source) -> None:
        """Begin to read KV into the fastest memory."""
        key = self.key(*source)
        if key not in self.memory[0]:
            self._came_from(key, "ahead")
            self._prefetcher.start((key,), partial(self._got, key, source[1]))

    def _came_from(self, key: str, tier: str) -> None:
        with self._noting:
            self._ahead[key] = tier

    def _is_in_memory(self, key: str) -> bool:
        return any(key in tier for tier in self.memory)

    def tier(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The tier that KV of these tokens comes from now, if there is any; see `Origin`."""
        return self._tier(self.key(behind, token_ids))

    def _tier(self, key: str) -> str:
        with self._noting:
            ahead = self._ahead.pop(key, None)
        return ahead or ("memory" if self._is_in_memory(key) else "disk")

    def best_encoding(
        self, behinds: Sequence[EncodedAfter], token_ids: Sequence[int], *, lazy: bool
    ) -> tuple[EncodedAfter, LayerSource, Origin] | None:
        """The first of several encodings of a chunk that has KV, with this KV.

        Args:
            behinds: what the chunk may have been encoded behind, best first.
            lazy: as `open`, else as `fetch`.
        """
        for behind in behinds:
            key = self.key(behind, token_ids)
            tier, began = self._tier(key), time.perf_counter()
            kv = self._open(key, token_ids) if lazy else self._fetch(key, token_ids)
            if kv is not None:
                taken = None if lazy else (time.perf_counter() - began) * 1000
                return behind, kv, Origin(tier, taken)
        return None

    def close(self) -> None:
        """Finish reading ahead, and release files. The remote tier is its owner's to close."""
        self._prefetcher.close()
        self._to_disk.close(_WRITING_S)
        if self.disk is not None:
            self.disk.close()


def memory_tiers(config: StoreConfig, device: torch.device | None) -> Iterator[MemoryStore]:
    """The stores in memory, fastest first: a CUDA device's, if it may be used, and the host's."""
    if device is None or device.type != "cuda":
        yield MemoryStore(config.memory_bytes)
        return
    room = config.device_bytes
    if room is None:
        free, _ = torch.cuda.mem_get_info(device)
        room = free // 4
    if room:
        yield MemoryStore(room, device)
    yield MemoryStore(config.memory_bytes, torch.device("cpu"))
