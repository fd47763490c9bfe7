"""The library: the chunks that an engine knows, what they were encoded behind, and their KV.

Three parts are joined here. The catalog on disk says which texts are chunks, the table finds them
in prompts, and the store has their KV. Of the model it knows only the fingerprint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from cached_rag.library.handed_over import HandedOver
from cached_rag.library.matching import ChunkTable, EncodedAfter

_log = logging.getLogger(__name__)
# Most tokens of texts that were learned from prompts. A token of a known text takes some 70 bytes.
LEARNED_TOKENS = 1 << 18
# How many chunks that `prefetch` brings are remembered as read from disk.
_AHEAD = 256


@dataclass(frozen=True)
class Origin:
    """Where KV came from.

    Attributes:
        tier: "memory", "disk", "ahead" (from disk, by `prefetch`), "kept" (what a prompt computed
            that begins alike), "harvest" (what a prompt computed that contains it) or "new"
            (encoded for this prompt).
        load_ms: milliseconds that fetching it took, or waiting for what is read ahead; None if it
            was not fetched by itself.
    """

    tier: str
    load_ms: float | None = None


KEPT = Origin("kept")


class Library:
    """The chunks of one model and one tenant. Safe for several threads."""

    def __init__(
        self,
        config: StoreConfig,
        maker: Maker,
        device: torch.device | None = None,
        memory: Sequence[MemoryStore] | None = None,
        forgotten: Callable[[Sequence[ChunkRecord]], object] = lambda _: None,
    ) -> None:
        """Open the files that the configuration names, and finish interrupted removals.

        Args:
            maker: the model, as KV in the store is marked with it.
            device: where the model computes; None for the CPU.
            memory: the tiers in memory of another tenant, to be shared with it; None for new ones.
            forgotten: called with chunks that were removed, by this process or another.

        Files that cannot be opened are logged, and nothing is kept on disk; see `check_kept`.
        """
        self.maker, self.fingerprint = maker, maker.model
        self.handed_over = HandedOver()
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
        self._ahead: deque[str] = deque(maxlen=_AHEAD)
        self._encoded_after: list[EncodedAfter] = []
        self._last_row = 0
        self._generation = self._evictions = 0
        self._lock = threading.Lock()
        self._forgotten = forgotten
        self._unwritten: dict[str, ChunkRecord] = {}
        # Texts that nobody gave, the oldest first, where no catalog marks them.
        self._learned: dict[str, None] = {}
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
        """Log a `StoreError` instead of raising it, for a question can be answered without a cache.

        The same message is logged once only.
        """
        try:
            yield
        except StoreError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("KV is computed anew, because the cache failed: %s", error)

    def check_kept(self) -> None:
        """Check that the files are open, if there are to be any, before encoding or deleting.

        Raises:
            StoreError: they could not be opened.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Finish reading ahead, and release files."""
        self._prefetcher.close()
        if self._catalog is not None:
            self._catalog.close()
        if self.disk is not None:
            self.disk.close()

    def refresh(self, *, force: bool = False) -> None:
        """Take over what other processes added or removed. Cheap if there is nothing new.

        Args:
            force: read the catalog even if it has not changed.
        """
        if self._catalog is None:
            return
        gone: list[ChunkRecord] = []
        with self.spared(), self._lock:
            if not (self._catalog.changed() or force):
                return
            gone = self._read(self._catalog)
        self._let_go(gone)

    def _read(self, catalog: Catalog) -> list[ChunkRecord]:
        """Bring the table and the prefixes up to date; returns the chunks that were removed."""
        gone: list[ChunkRecord] = []
        generation = catalog.generation()
        if generation != self._generation:
            known = catalog.text_digests() | self._unwritten.keys()
            gone = [chunk for chunk in self.table if chunk.text_digest not in known]
            self.table.discard(gone)
            self._generation = generation
        for row, chunk in catalog.modules(after=self._last_row):
            self.table.add(chunk)
            self._last_row = row
        self._encoded_after = _longest_first(EncodedAfter(*row) for row in catalog.prefixes())
        return gone

    def _let_go(self, chunks: Sequence[ChunkRecord]) -> None:
        """Delete the KV of removed chunks from memory, and tell the engine."""
        for key in self._keys(chunks):
            for tier in self.memory:
                tier.delete(key)
        if chunks:
            self._forgotten(chunks)

    @property
    def generation(self) -> int:
        """Changes whenever texts are forgotten in the files, by whichever process."""
        if self._catalog is None:
            return 0
        with self.spared():
            return self._catalog.generation() - self._evictions
        return -1

    def encoded_after(self) -> list[EncodedAfter]:
        """All that chunks were encoded behind.

        The longest prefix comes first; of two with the same prefix, the one with a context.
        """
        return self._encoded_after

    def add_encoded_after(self, behind: EncodedAfter) -> None:
        """Make known what chunks will be encoded behind."""
        with self._lock:
            self._encoded_after = _longest_first({*self._encoded_after, behind})
        if self._catalog is not None:
            self._catalog.add_prefix(behind.prefix_ids, behind.context)

    def add_chunks(self, chunks: Sequence[ChunkRecord]) -> None:
        """Make chunks known, so that they are found in prompts.

        Raises:
            StoreError: the catalog cannot be written.
        """
        if self._catalog is not None:  # first: `refresh` removes chunks that are not in the catalog
            self._catalog.add_chunks(chunks)
        self._know(chunks)

    def register(self, chunks: Sequence[ChunkRecord]) -> None:
        """As `add_chunks`, but never waits long, and never fails.

        Chunks that cannot be written to the catalog now are written when they have KV.
        """
        if self._catalog is not None:
            is_written = False
            with self.spared():
                self._catalog.add_chunks(chunks, BRIEFLY_S)
                is_written = True
            if not is_written:
                self._unwritten |= {chunk.text_digest: chunk for chunk in chunks}
        self._know(chunks)

    def _know(self, chunks: Sequence[ChunkRecord]) -> None:
        with self._lock:
            for chunk in chunks:
                self.table.add(chunk)
                self._learned.pop(chunk.text_digest, None)

    def learn(self, chunk: ChunkRecord) -> None:
        """As `register`, for a text that nobody gave, but prompts repeat.

        The oldest such texts are forgotten where all of them have more than `LEARNED_TOKENS`.
        """
        surplus: list[str] = []
        with self.spared():
            if self._catalog is not None:  # which knows what other processes were given
                self._catalog.add_chunks([chunk], BRIEFLY_S, learned=True)
            with self._lock:
                if self._catalog is None and self.table.by_digest(chunk.text_digest) is None:
                    self._learned[chunk.text_digest] = None
                self.table.add(chunk)
            surplus = self._surplus()
        if surplus:
            self._remove(surplus)
            self._evictions += 1  # which the catalog has counted as a removal, too

    def _surplus(self) -> list[str]:
        """Learned texts that go, so that those that stay have at most `LEARNED_TOKENS`."""
        learned = self._all_learned()
        chunks = [self.table.by_digest(name) for name in learned]
        sizes = [0 if chunk is None else len(chunk.token_ids) for chunk in chunks]
        excess, count = sum(sizes) - LEARNED_TOKENS, 0
        while excess > 0:
            excess -= sizes[count]
            count += 1
        return learned[:count]

    def _all_learned(self) -> list[str]:
        """Texts that nobody gave, the oldest first."""
        if self._catalog is not None:
            return self._catalog.learned()
        with self._lock:
            return list(self._learned)

    def given(self, texts: Sequence[str]) -> set[str]:
        """Those of these texts that are known, and were not only learned."""
        found = {text: chunk for text in texts if (chunk := self.table.get(text)) is not None}
        learned = set(self._all_learned()) if found else set()
        return {text for text, chunk in found.items() if chunk.text_digest not in learned}

    def remove(self, text_digests: Collection[str]) -> int:
        """Forget texts, and delete all their KV, whichever process encoded it.

        All texts that were learned from prompts go with them, as they may have the same words.

        Returns:
            How many KVs were deleted.

        Raises:
            StoreError: the files cannot be opened or written, so KV would stay there.
        """
        self.check_kept()
        if not text_digests:
            return 0
        return self._remove({*text_digests, *self._all_learned()})

    def _remove(self, text_digests: Collection[str]) -> int:
        with self._lock:
            chunks = [m for m in map(self.table.by_digest, text_digests) if m is not None]
            for text_digest in text_digests:
                self._unwritten.pop(text_digest, None)
                self._learned.pop(text_digest, None)
            self.table.discard(chunks)
        if self._catalog is None:
            gone = sum(map(self.store.delete, self._keys(chunks)))
        else:
            gone = self._catalog.remove(self.store, text_digests)
        self.refresh(force=True)
        self._let_go(chunks)
        return gone

    def knows(self, text_digest: str) -> bool:
        """Whether a text is a chunk, by the catalog, which may know more than this process."""
        if self._catalog is None:
            return self.table.by_digest(text_digest) is not None
        if text_digest in self._unwritten:
            self._catalog.add_chunks([self._unwritten.pop(text_digest)])
        return bool(self._catalog.find([text_digest]))

    def _keys(self, chunks: Iterable[ChunkRecord]) -> list[str]:
        """All keys under which the store may have KV of chunks."""
        behinds = {EncodedAfter(()), *self._encoded_after}
        return [self.key(behind, chunk.token_ids) for chunk in chunks for behind in behinds]

    def other_makers(self, chunks: Iterable[ChunkRecord]) -> list[Maker]:
        """Other models, or other dtypes of this one, that have KV of these chunks in the store."""
        found: list[Maker] = []
        if self._catalog is not None:
            with self.spared():
                found = self._catalog.makers_of(chunk.text_digest for chunk in chunks)
        return found

    def key(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The key under which the store has the KV of these tokens, encoded behind that."""
        return module_key(
            self.fingerprint, behind.prefix_ids, token_ids, self.namespace, behind.context
        )

    def holds(self, behind: EncodedAfter, token_ids: Sequence[int]) -> bool:
        """Whether there is KV of these tokens, encoded behind that; False if the store fails."""
        with self.spared():
            return self.key(behind, token_ids) in self.store
        return False

    def put(self, behind: EncodedAfter, kv: ModuleKV, text_digest: str | None = None) -> None:
        """Keep KV of a chunk, of a prefix, or of a part of a schema.

        Args:
            behind: what stood before it while it was encoded.
            text_digest: the digest of a chunk's text; None if the KV is not a chunk's. If the
                chunk was removed while it was encoded, its KV is not kept.

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
        """Bytes of KV in memory: the host's and a CUDA device's together."""
        return sum(tier.nbytes for tier in self.memory)

    def store_bytes(self) -> int:
        """Bytes of KV in the slowest tier; 0 if its index cannot be read (which is logged)."""
        with self.spared():
            return self.store.nbytes
        return 0

    def memory_tokens(self) -> int:
        """Number of tokens whose KV is in memory; a token in two tiers counts twice."""
        return sum(tier.num_tokens for tier in self.memory)

    def fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        """KV of these tokens; None if there is none, or it cannot be read (which is logged).

        If `prefetch` is reading it already, this waits for that.
        """
        self._prefetcher.wait(self.key(behind, token_ids))
        return self._fetch(behind, token_ids)

    def _fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        with self.spared():
            return self.store.get(self.key(behind, token_ids), token_ids)
        return None

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts into memory, in the encoding with the longest prefix."""
        if not isinstance(self.store, TieredStore):
            return
        for chunk in filter(None, (self.table.get(text.strip()) for text in texts)):
            for behind in self._encoded_after:
                if self.holds(behind, chunk.token_ids):
                    key = self.key(behind, chunk.token_ids)
                    if not self._is_in_memory(key):
                        self._ahead.append(key)
                    fetch = partial(self._fetch, behind, chunk.token_ids)
                    self._prefetcher.start(key, fetch)
                    break

    def _is_in_memory(self, key: str) -> bool:
        return any(key in tier for tier in self.memory)

    def tier(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The tier that KV of these tokens comes from now, if there is any; see `Origin`."""
        key = self.key(behind, token_ids)
        with suppress(ValueError):
            self._ahead.remove(key)
            return "ahead"
        return "memory" if self._is_in_memory(key) else "disk"

    def open(self, behind: EncodedAfter, token_ids: Sequence[int]) -> LayerSource | None:
        """As `fetch`, but KV on disk is only opened, and read layer by layer when it is used."""
        with self.spared():
            return self.store.open(self.key(behind, token_ids), token_ids)
        return None

    def best_encoding(
        self, behinds: Sequence[EncodedAfter], token_ids: Sequence[int], *, lazy: bool
    ) -> tuple[EncodedAfter, LayerSource, Origin] | None:
        """The first of several encodings of a chunk that has KV, with this KV.

        Args:
            behinds: what the chunk may have been encoded behind, best first.
            lazy: as `open`, else as `fetch`.
        """
        for behind in behinds:
            tier, began = self.tier(behind, token_ids), time.perf_counter()
            kv = self.open(behind, token_ids) if lazy else self.fetch(behind, token_ids)
            if kv is not None:
                taken = None if lazy else (time.perf_counter() - began) * 1000
                return behind, kv, Origin(tier, taken)
        return None


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


def _longest_first(behinds: Iterable[EncodedAfter]) -> list[EncodedAfter]:
    return sorted(behinds, key=lambda b: (len(b.prefix_ids), b.context != ""), reverse=True)
