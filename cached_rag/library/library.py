"""The modules an engine knows: their texts, the prefixes they may stand behind, and their KV.

Joins the catalog (what text is a module), the table (finding it in a prompt) and the store (its
KV). Knows no model beyond a fingerprint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from cached_rag.config import StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv.fingerprint import module_key
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.store import (
    Catalog,
    ChunkRecord,
    DiskStore,
    KVStore,
    Maker,
    MemoryStore,
    Prefetcher,
    TieredStore,
)
from cached_rag.kv.store.database import BRIEFLY_S
from cached_rag.library.matching import ChunkTable, EncodedAfter

_log = logging.getLogger(__name__)


class Library:
    """Modules of one model and one tenant. Safe for several threads."""

    def __init__(
        self,
        config: StoreConfig,
        maker: Maker,
        device: torch.device | None = None,
        memory: Sequence[MemoryStore] | None = None,
        forgotten: Callable[[Sequence[ChunkRecord]], object] = lambda _: None,
    ) -> None:
        """Open what the configuration names, and end removals that were interrupted.

        Args:
            memory: another tenant's tiers in memory, to be used together; None for new ones.
            forgotten: given the modules that are none any more, whoever removed them.
        """
        self.maker, self.fingerprint = maker, maker.model
        self.namespace = config.namespace
        self.is_pipelined = bool(config.pipelined)
        self.table = ChunkTable()
        self.disk: DiskStore | None = None
        self._catalog: Catalog | None = None
        self.memory = tuple(memory_tiers(config, device) if memory is None else memory)
        tiers: list[KVStore] = list(self.memory)
        self._lost: StoreError | None = None
        self._told: set[str] = set()
        if config.path is not None:
            try:
                self._open_files(Path(config.path), config)
            except StoreError as error:
                self._lost = error
                _log.warning("nothing is cached on disk: %s", error)
        if self.disk is not None:
            tiers.append(self.disk)
        self.store: KVStore = TieredStore(tiers) if len(tiers) > 1 else tiers[0]
        self._prefetcher = Prefetcher()
        self._encoded_after: list[EncodedAfter] = []
        self._last_row = 0
        self._generation = 0
        self._lock = threading.Lock()
        self._forgotten = forgotten
        self._unwritten: dict[str, ChunkRecord] = {}
        if self._catalog is not None:
            with self.spared():
                self._catalog.finish_removals(self.store)
        self.refresh(force=True)

    def _open_files(self, root: Path, config: StoreConfig) -> None:
        disk = DiskStore(root, codec=config.codec, max_bytes=config.disk_bytes)
        try:
            self._catalog = Catalog(root / "catalog.sqlite", self.maker, config.namespace)
        except BaseException:
            disk.close()
            raise
        self.disk = disk

    @contextmanager
    def spared(self) -> Iterator[None]:
        """What a question does with the cache: where that fails, it goes on without, and says so.

        Said once, however many questions meet the same.
        """
        try:
            yield
        except StoreError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("what a cache would have spared is computed anew: %s", error)

    def check_kept(self) -> None:
        """See that what is encoded, or deleted, is so on disk too, where that is wanted.

        Raises:
            StoreError: the files could not be opened.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Write what is pending and release files."""
        self._prefetcher.close()
        if self._catalog is not None:
            self._catalog.close()
        if self.disk is not None:
            self.disk.close()

    def refresh(self, *, force: bool = False) -> None:
        """Learn what other processes added or removed; costs next to nothing if they did not."""
        if self._catalog is None:
            return
        gone: list[ChunkRecord] = []
        with self.spared(), self._lock:
            if not (self._catalog.changed() or force):
                return
            gone = self._read(self._catalog)
        self._let_go(gone)

    def _read(self, catalog: Catalog) -> list[ChunkRecord]:
        """Bring table and prefixes up to date; returns what is no module any more."""
        gone: list[ChunkRecord] = []
        generation = catalog.generation()
        if generation != self._generation:
            known = catalog.text_digests() | self._unwritten.keys()
            gone = [module for module in self.table if module.text_digest not in known]
            self.table.discard(gone)
            self._generation = generation
        for row, module in catalog.modules(after=self._last_row):
            self.table.add(module)
            self._last_row = row
        self._encoded_after = _longest_first(EncodedAfter(*row) for row in catalog.prefixes())
        return gone

    def _let_go(self, modules: Sequence[ChunkRecord]) -> None:
        """Drop what is in memory of modules that are none any more."""
        for key in self._keys(modules):
            for tier in self.memory:
                tier.delete(key)
        if modules:
            self._forgotten(modules)

    def encoded_after(self) -> list[EncodedAfter]:
        """What modules may stand behind: longest prefix first, with a context before without."""
        return self._encoded_after

    def add_encoded_after(self, behind: EncodedAfter) -> None:
        """Know one more thing that modules may stand behind."""
        with self._lock:
            self._encoded_after = _longest_first({*self._encoded_after, behind})
        if self._catalog is not None:
            self._catalog.add_prefix(behind.prefix_ids, behind.context)

    def add_chunks(self, modules: Sequence[ChunkRecord]) -> None:
        """Know texts as modules, so that they are found in prompts."""
        if self._catalog is not None:  # first, for `refresh` takes out what is not there
            self._catalog.add_chunks(modules)
        self._know(modules)

    def register(self, modules: Sequence[ChunkRecord]) -> None:
        """As `add_chunks`; what cannot be written down at once is when its KV is there."""
        if self._catalog is not None:
            is_written = False
            with self.spared():
                self._catalog.add_chunks(modules, BRIEFLY_S)
                is_written = True
            if not is_written:
                self._unwritten |= {module.text_digest: module for module in modules}
        self._know(modules)

    def _know(self, modules: Sequence[ChunkRecord]) -> None:
        with self._lock:
            for module in modules:
                self.table.add(module)

    def remove(self, text_digests: Collection[str]) -> int:
        """Forget texts and all their KV, whoever encoded them; says how many KVs went.

        Raises:
            StoreError: the files cannot be opened or written, so they would stay there.
        """
        self.check_kept()
        with self._lock:
            modules = [m for m in map(self.table.by_digest, text_digests) if m is not None]
            for text_digest in text_digests:
                self._unwritten.pop(text_digest, None)
            self.table.discard(modules)
        if self._catalog is None:
            gone = sum(map(self.store.delete, self._keys(modules)))
        else:
            gone = self._catalog.remove(self.store, text_digests)
        self.refresh(force=True)
        self._let_go(modules)
        return gone

    def knows(self, text_digest: str) -> bool:
        """Whether a text is a module, as far as any process says."""
        if self._catalog is None:
            return self.table.by_digest(text_digest) is not None
        if text_digest in self._unwritten:
            self._catalog.add_chunks([self._unwritten.pop(text_digest)])
        return bool(self._catalog.find([text_digest]))

    def _keys(self, modules: Iterable[ChunkRecord]) -> list[str]:
        """All keys that modules' KV may have."""
        behinds = {EncodedAfter(()), *self._encoded_after}
        return [self.key(behind, module.token_ids) for module in modules for behind in behinds]

    def other_makers(self, modules: Iterable[ChunkRecord]) -> list[Maker]:
        """Other models, or this one in other dtypes, that encoded some of these in this store."""
        found: list[Maker] = []
        if self._catalog is not None:
            with self.spared():
                found = self._catalog.makers_of(module.text_digest for module in modules)
        return found

    def key(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The store key of a module in one encoding."""
        return module_key(
            self.fingerprint, behind.prefix_ids, token_ids, self.namespace, behind.context
        )

    def holds(self, behind: EncodedAfter, token_ids: Sequence[int]) -> bool:
        """Whether there is KV for a module behind that."""
        with self.spared():
            return self.key(behind, token_ids) in self.store
        return False

    def put(self, behind: EncodedAfter, kv: ModuleKV, text_digest: str | None = None) -> None:
        """Keep the KV of a module, of a prefix, or of a part of a schema.

        Args:
            text_digest: of the module's text; if that was removed since, nothing is kept.

        Raises:
            StoreFullError: there is no room.
        """
        key = self.key(behind, kv.token_ids)
        if text_digest is None and behind.context and self._catalog is not None:
            self._catalog.add_other(kv.token_ids, behind.context)
        self.store.put(key, kv)
        if text_digest is not None and not self.knows(text_digest):
            self.store.delete(key)

    def memory_bytes(self) -> int:
        """Bytes of KV in memory, the host's and a device's."""
        return sum(tier.nbytes for tier in self.memory)

    def store_bytes(self) -> int:
        """Bytes of KV in the last tier; 0 where its index cannot be read (which is logged)."""
        with self.spared():
            return self.store.nbytes
        return 0

    def memory_tokens(self) -> int:
        """Tokens whose KV is there; one that is in two tiers counts twice, as its bytes do."""
        return sum(tier.num_tokens for tier in self.memory)

    def fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        """A module's KV, or None if there is none or it cannot be had (which is logged)."""
        self._prefetcher.wait(self.key(behind, token_ids))
        return self._fetch(behind, token_ids)

    def _fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        with self.spared():
            return self.store.get(self.key(behind, token_ids), token_ids)
        return None

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring texts' KV into memory, each behind the longest prefix that has it."""
        if not isinstance(self.store, TieredStore):
            return
        for module in filter(None, (self.table.get(text.strip()) for text in texts)):
            for behind in self._encoded_after:
                if self.holds(behind, module.token_ids):
                    fetch = partial(self._fetch, behind, module.token_ids)
                    self._prefetcher.start(self.key(behind, module.token_ids), fetch)
                    break

    def open(self, behind: EncodedAfter, token_ids: Sequence[int]) -> LayerSource | None:
        """As `fetch`, but what is on disk is read layer by layer, when it is used."""
        with self.spared():
            return self.store.open(self.key(behind, token_ids), token_ids)
        return None

    def best_encoding(
        self, behinds: Sequence[EncodedAfter], token_ids: Sequence[int], *, lazy: bool
    ) -> tuple[EncodedAfter, LayerSource] | None:
        """The module's KV behind the first of `behinds` for which there is any; read, or opened."""
        for behind in behinds:
            kv = self.open(behind, token_ids) if lazy else self.fetch(behind, token_ids)
            if kv is not None:
                return behind, kv
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


def _longest_first(behinds: Iterable[EncodedAfter]) -> list[EncodedAfter]:
    return sorted(behinds, key=lambda b: (len(b.prefix_ids), b.context != ""), reverse=True)
