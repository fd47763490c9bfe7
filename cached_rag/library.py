"""The modules an engine knows: their texts, the prefixes they may stand behind, and their KV.

Joins the catalog (what text is a module), the table (finding it in a prompt) and the store (its
KV). Knows no model beyond a fingerprint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cached_rag.config import StoreConfig
from cached_rag.errors import CorruptBlobError
from cached_rag.fingerprint import module_key
from cached_rag.kv import ModuleKV
from cached_rag.match import ModuleTable
from cached_rag.store import Catalog, DiskStore, KVStore, MemoryStore, ModuleRecord, TieredStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoding:
    """A module's KV and the prefix it was computed behind."""

    prefix_ids: tuple[int, ...]
    kv: ModuleKV


class Library:
    """Modules of one model and one tenant. Safe for several threads."""

    def __init__(self, config: StoreConfig, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.namespace = config.namespace
        self.table = ModuleTable()
        self.disk: DiskStore | None = None
        memory = MemoryStore(config.memory_bytes)
        if config.path is None:
            self.store: KVStore = memory
            self._catalog: Catalog | None = None
        else:
            root = Path(config.path)
            self.disk = DiskStore(root, codec=config.codec, max_bytes=config.disk_bytes)
            self.store = TieredStore([memory, self.disk])
            self._catalog = Catalog(root / "catalog.sqlite", fingerprint, config.namespace)
        self._prefixes: list[tuple[int, ...]] = []
        self._last_row = 0
        self._generation = 0
        self._lock = threading.Lock()
        self.refresh(force=True)

    def close(self) -> None:
        """Write what is pending and release files."""
        if self._catalog is not None:
            self._catalog.close()
        if self.disk is not None:
            self.disk.close()

    def refresh(self, *, force: bool = False) -> None:
        """Learn what other processes added or removed; costs next to nothing if they did not."""
        if self._catalog is None or not (self._catalog.changed() or force):
            return
        with self._lock:
            generation = self._catalog.generation()
            if generation != self._generation:
                self.table.clear()
                self._last_row, self._generation = 0, generation
            for row, module in self._catalog.modules(after=self._last_row):
                self.table.add(module)
                self._last_row = row
            self._prefixes = _longest_first(self._catalog.prefixes())

    def prefixes(self) -> list[tuple[int, ...]]:
        """Known prefixes, longest first."""
        return self._prefixes

    def add_prefix(self, prefix_ids: tuple[int, ...]) -> None:
        """Know one more prefix that modules may stand behind."""
        with self._lock:
            self._prefixes = _longest_first({*self._prefixes, prefix_ids})
        if self._catalog is not None:
            self._catalog.add_prefix(prefix_ids)

    def add_modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Know texts as modules, so that they are found in prompts."""
        with self._lock:
            for module in modules:
                self.table.add(module)
        if self._catalog is not None:
            self._catalog.add_modules(modules)

    def remove(self, modules: Iterable[ModuleRecord]) -> int:
        """Forget modules and their KV behind every known prefix; says how many KVs went."""
        modules = list(modules)
        behind = [(), *self._prefixes]
        keys = [self.key(prefix, module.token_ids) for module in modules for prefix in behind]
        gone = sum(self.store.delete(key) for key in keys)
        if self._catalog is not None:
            self._catalog.remove_modules([module.text_digest for module in modules])
            self.refresh(force=True)
        else:
            self.table.discard(modules)
        return gone

    def key(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The store key of a module behind a prefix."""
        return module_key(self.fingerprint, prefix_ids, token_ids, self.namespace)

    def holds(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether there is KV for a module behind a prefix."""
        return self.key(prefix_ids, token_ids) in self.store

    def put(self, prefix_ids: Sequence[int], kv: ModuleKV) -> None:
        """Keep a module's KV.

        Raises:
            StoreFullError: there is no room.
        """
        self.store.put(self.key(prefix_ids, kv.token_ids), kv)

    def fetch(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> ModuleKV | None:
        """A module's KV, or None if there is none or it is damaged (which is logged)."""
        try:
            return self.store.get(self.key(prefix_ids, token_ids), token_ids)
        except CorruptBlobError as error:
            _log.warning("%s The module is computed anew.", error)
            return None

    def best_encoding(
        self, prefixes: Sequence[tuple[int, ...]], token_ids: Sequence[int]
    ) -> Encoding | None:
        """The module's KV behind the first of `prefixes` for which there is any."""
        for prefix_ids in prefixes:
            kv = self.fetch(prefix_ids, token_ids)
            if kv is not None:
                return Encoding(prefix_ids, kv)
        return None


def _longest_first(prefixes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(prefixes, key=len, reverse=True)
