"""The modules an engine knows: their texts, the prefixes they may stand behind, and their KV.

Joins the catalog (what text is a module), the table (finding it in a prompt) and the store (its
KV). Knows no model beyond a fingerprint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cached_rag.config import StoreConfig
from cached_rag.errors import CorruptBlobError
from cached_rag.kv.fingerprint import module_key
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.store import (
    Catalog,
    DiskStore,
    KVStore,
    Maker,
    MemoryStore,
    ModuleRecord,
    Prefetcher,
    TieredStore,
)
from cached_rag.library.matching import ModuleTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Behind:
    """What modules were encoded behind: a prefix, and the name of a context that followed it."""

    prefix_ids: tuple[int, ...]
    context: str = ""


@dataclass(frozen=True)
class Encoding:
    """A module's KV and what it was computed behind."""

    behind: Behind
    kv: LayerSource


class Library:
    """Modules of one model and one tenant. Safe for several threads."""

    def __init__(
        self,
        config: StoreConfig,
        maker: Maker,
        device: torch.device | None = None,
        memory: Sequence[MemoryStore] | None = None,
    ) -> None:
        """Open what the configuration names.

        Args:
            memory: another tenant's tiers in memory, to be used together; None for new ones.
        """
        self.maker, self.fingerprint = maker, maker.model
        self.namespace = config.namespace
        self.is_pipelined = bool(config.pipelined)
        self.table = ModuleTable()
        self.disk: DiskStore | None = None
        self._catalog: Catalog | None = None
        self.memory = tuple(memory_tiers(config, device) if memory is None else memory)
        tiers: list[KVStore] = list(self.memory)
        if config.path is not None:
            root = Path(config.path)
            self.disk = DiskStore(root, codec=config.codec, max_bytes=config.disk_bytes)
            self._catalog = Catalog(root / "catalog.sqlite", maker, config.namespace)
            tiers.append(self.disk)
        self.store: KVStore = TieredStore(tiers) if len(tiers) > 1 else tiers[0]
        self._prefetcher = Prefetcher()
        self._behinds: list[Behind] = []
        self._last_row = 0
        self._generation = 0
        self._lock = threading.Lock()
        self.refresh(force=True)

    def close(self) -> None:
        """Write what is pending and release files."""
        self._prefetcher.close()
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
            self._behinds = _longest_first(Behind(*row) for row in self._catalog.prefixes())

    def behinds(self) -> list[Behind]:
        """What modules may stand behind: longest prefix first, with a context before without."""
        return self._behinds

    def add_behind(self, behind: Behind) -> None:
        """Know one more thing that modules may stand behind."""
        with self._lock:
            self._behinds = _longest_first({*self._behinds, behind})
        if self._catalog is not None:
            self._catalog.add_prefix(behind.prefix_ids, behind.context)

    def add_modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Know texts as modules, so that they are found in prompts."""
        with self._lock:
            for module in modules:
                self.table.add(module)
        if self._catalog is not None:
            self._catalog.add_modules(modules)

    def remove(self, modules: Iterable[ModuleRecord]) -> int:
        """Forget modules and all their KV; says how many KVs went."""
        modules = list(modules)
        behinds = {Behind(()), *self._behinds}
        keys = [self.key(behind, module.token_ids) for module in modules for behind in behinds]
        gone = sum(self.store.delete(key) for key in keys)
        if self._catalog is not None:
            self._catalog.remove_modules([module.text_digest for module in modules])
            self.refresh(force=True)
        else:
            self.table.discard(modules)
        return gone

    def other_makers(self, modules: Iterable[ModuleRecord]) -> list[Maker]:
        """Other models, or this one in other dtypes, that encoded some of these in this store."""
        if self._catalog is None:
            return []
        return self._catalog.makers_of(module.text_digest for module in modules)

    def key(self, behind: Behind, token_ids: Sequence[int]) -> str:
        """The store key of a module in one encoding."""
        return module_key(
            self.fingerprint, behind.prefix_ids, token_ids, self.namespace, behind.context
        )

    def holds(self, behind: Behind, token_ids: Sequence[int]) -> bool:
        """Whether there is KV for a module behind that."""
        return self.key(behind, token_ids) in self.store

    def put(self, behind: Behind, kv: ModuleKV) -> None:
        """Keep a module's KV.

        Raises:
            StoreFullError: there is no room.
        """
        self.store.put(self.key(behind, kv.token_ids), kv)

    def memory_bytes(self) -> int:
        """Bytes of KV in memory, the host's and a device's."""
        return sum(tier.nbytes for tier in self.memory)

    def memory_tokens(self) -> int:
        """Tokens whose KV is there; one that is in two tiers counts twice, as its bytes do."""
        return sum(tier.num_tokens for tier in self.memory)

    def fetch(self, behind: Behind, token_ids: Sequence[int]) -> ModuleKV | None:
        """A module's KV, or None if there is none or it is damaged (which is logged)."""
        self._prefetcher.wait(self.key(behind, token_ids))
        return self._fetch(behind, token_ids)

    def _fetch(self, behind: Behind, token_ids: Sequence[int]) -> ModuleKV | None:
        try:
            return self.store.get(self.key(behind, token_ids), token_ids)
        except CorruptBlobError as error:
            _log.warning("%s The module is computed anew.", error)
            return None

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring texts' KV into memory, each behind the longest prefix that has it."""
        if not isinstance(self.store, TieredStore):
            return
        for module in filter(None, (self.table.get(text.strip()) for text in texts)):
            for behind in self._behinds:
                if self.holds(behind, module.token_ids):
                    fetch = partial(self._fetch, behind, module.token_ids)
                    self._prefetcher.start(self.key(behind, module.token_ids), fetch)
                    break

    def open(self, behind: Behind, token_ids: Sequence[int]) -> LayerSource | None:
        """As `fetch`, but what is on disk is read layer by layer, when it is used."""
        try:
            return self.store.open(self.key(behind, token_ids), token_ids)
        except CorruptBlobError as error:
            _log.warning("%s The module is computed anew.", error)
            return None

    def best_encoding(
        self, behinds: Sequence[Behind], token_ids: Sequence[int], *, lazy: bool
    ) -> Encoding | None:
        """The module's KV behind the first of `behinds` for which there is any; read, or opened."""
        for behind in behinds:
            kv = self.open(behind, token_ids) if lazy else self.fetch(behind, token_ids)
            if kv is not None:
                return Encoding(behind, kv)
        return None


def memory_tiers(config: StoreConfig, device: torch.device | None) -> Iterator[MemoryStore]:
    """The stores in memory, fastest first: a CUDA device's if it may be used, and the host's."""
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


def _longest_first(behinds: Iterable[Behind]) -> list[Behind]:
    return sorted(behinds, key=lambda b: (len(b.prefix_ids), b.context != ""), reverse=True)
