"""The library: the chunks that an engine knows, what they were encoded behind, and their KV.

Three parts are joined here. The catalog on disk says which texts are chunks, the table finds them
in prompts, and the store has their KV. Of the model it knows only the fingerprint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from weakref import WeakMethod, WeakSet

import torch

from cached_rag.config import StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import CATALOG, Catalog, ChunkRecord, Maker
from cached_rag.kv.database import BRIEFLY_S, IN_MEMORY, PATIENCE_S
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.entries import check_reach, until_when
from cached_rag.kv.holdings import Removals
from cached_rag.kv.remote import RemoteTier
from cached_rag.kv.tiers import Terms
from cached_rag.library.handed_over import HandedOver
from cached_rag.library.matching import ChunkTable, EncodedAfter
from cached_rag.library.shelf import Shelf, Source, Wanted, memory_tiers

_log = logging.getLogger(__name__)
# Most tokens of texts that were learned from prompts. A token of a known text takes some 70 bytes.
LEARNED_TOKENS = 1 << 18
# Is told of chunks that were removed.
Forgotten = Callable[[Sequence[ChunkRecord]], object]
# Held while a library begins or ceases to use what others know, too.
_SHARING = threading.Lock()


class Known:
    """What a tenant's engines know: texts, and what they stood behind.

    Attributes:
        catalog: has all of it on disk; or in memory, where all libraries of a tenant have the same.
        table: all texts.
        encoded_after: what they stood behind, the longest prefix first; of those with the same
            prefix, the one of the highest rank.
        lock: to be held while any of these is changed.
        users: the open libraries that use it.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.table = ChunkTable()
        self.encoded_after: list[EncodedAfter] = []
        self.lock = threading.Lock()
        self.users: WeakSet[Library] = WeakSet()

    def surplus(self) -> list[str]:
        """The learned texts that go, so that those that stay have at most `LEARNED_TOKENS`."""
        learned = self.catalog.learned()
        chunks = map(self.table.by_digest, learned)
        sizes = [0 if chunk is None else chunk.num_tokens for chunk in chunks]
        excess, older = sum(sizes) - LEARNED_TOKENS, accumulate(sizes, initial=0)
        return [name for name, tokens in zip(learned, older, strict=False) if tokens < excess]

    def add_behind(self, behind: EncodedAfter) -> None:
        """Add what texts will be encoded behind.

        Raises:
            StoreError: the catalog cannot be written.
        """
        self.catalog.add_prefix(*behind)
        with self.lock:
            self.stand_behind({*self.encoded_after, behind})

    def stand_behind(self, behinds: Iterable[EncodedAfter]) -> None:
        """Take over what texts stood behind; under the lock."""
        self.encoded_after = sorted(
            behinds, key=lambda b: (len(b.prefix_ids), b.rank, b.context), reverse=True
        )


class Library:
    """The chunks of one model and one tenant. Safe for several threads.

    Attributes:
        shelf: has their KV.
        known: what is known of them.
        table: finds them in prompts.
        handed_over: those that are expected in a prompt to come.
        seen: number of removals in the catalog, by whichever process, that are taken over.
    """

    def __init__(
        self,
        config: StoreConfig,
        maker: Maker,
        device: torch.device | None = None,
        beside: Library | None = None,
        *,
        remote: RemoteTier | None = None,
    ) -> None:
        """Open the files that the configuration names, and finish interrupted removals.

        Args:
            maker: the model, as KV in the store is marked with it.
            device: where the model computes; None for the CPU.
            beside: another tenant's, whose memory this one shares; None for memory of its own.
            remote: the tier on another machine, which is not closed with the library.

        Files that cannot be opened are logged, and nothing is kept on disk; see `check_kept`.
        """
        disk: DiskStore | None = None
        catalog: Catalog | None = None
        self._lost: StoreError | None = None
        if config.path is not None:
            root, bound = Path(config.path), config.disk_bytes
            try:
                disk = DiskStore(root, config.codec, bound, config.signing_key)
                catalog = Catalog(root / CATALOG, maker, config.namespace)
            except StoreError as error:
                disk, self._lost = None, error
                _log.warning("nothing is cached on disk: %s", error)
        self.maker, self.namespace = maker, config.namespace
        self.is_pipelined, self._ttl_seconds = bool(config.pipelined), config.ttl_seconds
        tiers = tuple(memory_tiers(config, device)) if beside is None else beside.shelf.memory
        self.shelf: Shelf = Shelf(maker.model, self.namespace, tiers, disk, remote, self._deletions)
        self.handed_over = HandedOver()
        self._shares_memory = beside is not None
        self._forgotten: WeakMethod[Forgotten] | None = None
        # What is known in memory, by the names of tenants.
        self._tenants: dict[str, Known] = {} if beside is None else beside._tenants
        with _SHARING:
            if catalog is None and self.namespace not in self._tenants:
                self._tenants[self.namespace] = Known(Catalog(IN_MEMORY, maker, self.namespace))
            self.known = self._tenants[self.namespace] if catalog is None else Known(catalog)
            self.known.users.add(self)
        self._catalog, self.table = self.known.catalog, self.known.table
        self._last_row = self._version = 0
        self.seen = self._evictions = self._num_removals = self._forgets = 0
        self._removals = self._finished()
        self.refresh(force=True)

    def _finished(self) -> Removals:
        """The removals of this tenant; those that were interrupted are finished."""
        remote = self.shelf.remote
        removals = Removals(self._catalog, self.shelf.delete, remote)
        with self.shelf.spared():
            if remote is not None:
                removals.note_remote(remote.label)
            removals.finish()
        try:
            removals.finish_far()
        except StoreError as error:
            _log.warning("%s", error)
        return removals

    def check_kept(self) -> None:
        """Check that the files are open, if there are to be any, before encoding or deleting.

        Raises:
            StoreError: they could not be opened.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Finish reading ahead, and release files. The remote tier is its owner's to close.

        Without files nobody would know any more whose KV it is, so it goes from shared memory.
        """
        self.shelf.close()
        with _SHARING:
            self.known.users.discard(self)
            if self.known.users:
                return
            if self._tenants.get(self.namespace) is self.known:
                del self._tenants[self.namespace]
        if self.shelf.remote is not None:
            self.shelf.remote.settle(self.namespace)
        if self._shares_memory and self.shelf.disk is None:
            self._drop_from_memory(self.table)
        self._catalog.close()

    def refresh(self, *, force: bool = False) -> None:
        """Take over what other processes added or removed. Cheap if there is nothing new.

        Args:
            force: read the catalog even if it has not changed.
        """
        gone: list[ChunkRecord] = []
        with self.shelf.spared(), self.known.lock:
            version = self._catalog.database.version()
            if version == self._version and not force:
                return
            gone = self._read()
            self._version = version
        self._let_go(gone)

    def _read(self) -> list[ChunkRecord]:
        """Bring the table and the prefixes up to date; returns the chunks that were removed."""
        # All is read before anything is changed: else a failure would lose what was removed.
        generation, gone = self._catalog.generation(), list[ChunkRecord]()
        is_new = generation != self.seen
        known = self._catalog.text_digests() if is_new else frozenset()
        added = list(self._catalog.modules(after=self._last_row))
        self.known.stand_behind(EncodedAfter(*row) for row in self._catalog.prefixes())
        if is_new:
            gone = [chunk for chunk in self.table if chunk.text_digest not in known]
            self.table.discard(gone)
            self.seen = generation
        for row, chunk in added:
            self.table.add(chunk)
            self._last_row = row
        return gone

    def when_forgotten(self, tell: Forgotten) -> None:
        """Have a method called with chunks that were removed, by this process or another.

        Its object is not kept alive by the library.
        """
        self._forgotten = WeakMethod(tell)

    def _let_go(self, chunks: Sequence[ChunkRecord]) -> None:
        """Delete the KV of removed chunks from memory, and tell all engines that knew them."""
        self._drop_from_memory(chunks)
        with _SHARING:
            methods = [one._forgotten for one in self.known.users if chunks and one._forgotten]
        for forgotten in filter(None, (method() for method in methods)):
            forgotten(chunks)

    def _drop_from_memory(self, chunks: Iterable[ChunkRecord]) -> None:
        for key in self._keys(chunks):
            for tier in self.shelf.memory:
                tier.delete(key)

    @property
    def generation(self) -> object:
        """Changes whenever texts are forgotten, by whichever process, and before these go."""
        known = self.shelf.spare(lambda: self._catalog.generation() - self._evictions, -1)
        return self._forgets, known

    def encoded_after(self) -> list[EncodedAfter]:
        """All that chunks were encoded behind, see `Known.encoded_after`."""
        return self.known.encoded_after

    def add_encoded_after(self, behind: EncodedAfter) -> None:
        """Make known what chunks will be encoded behind, to other machines as well."""
        self.known.add_behind(behind)
        self.shelf.tell(behind)

    def listen(self) -> list[str]:
        """Take over what other machines encode chunks behind, now and then.

        Returns:
            Why that failed, for the user; empty if it did not.
        """
        try:
            for new in {*self.shelf.told()} - {*self.encoded_after()}:
                self.known.add_behind(new)
        except StoreError as error:
            return [str(error)]
        return []

    def present(self, behind: EncodedAfter, chunks: Sequence[ChunkRecord]) -> set[tuple[int, ...]]:
        """The tokens of those of these texts whose KV is kept, here or in the remote tier.

        What is only here is sent there.
        """
        shelf, remote = self.shelf, self.shelf.remote
        texts = {chunk.token_ids: chunk.text_digest for chunk in chunks}
        here = {ids for ids in texts if shelf.holds(behind, ids)}
        if remote is None:
            return here
        keys = {ids: shelf.key(behind, ids) for ids in texts}
        held = shelf.spare(lambda: remote.holds(self.namespace, keys.values()), None)
        if held is None:
            remote.miss(self.namespace, [keys[ids] for ids in here])
            return here
        for ids in here:
            if keys[ids] not in held and (kv := shelf.fetch(behind, ids)) is not None:
                remote.offer(self.namespace, keys[ids], kv, partial(self.knows, texts[ids]))
        return here | {ids for ids, key in keys.items() if key in held}

    def unsent(self, sources: Iterable[Source]) -> int:
        """Wait until KV is in the remote store, if there is one; says of how many it may not be."""
        if (remote := self.shelf.remote) is None:
            return 0
        return remote.drain(self.namespace, {self.shelf.key(*source) for source in sources})

    def add_chunks(self, chunks: Sequence[ChunkRecord], patience_s: float = PATIENCE_S) -> None:
        """Make chunks known, so that they are found in prompts.

        Args:
            patience_s: how long to wait for another process that is writing.

        Raises:
            StoreError: the catalog cannot be written.
        """
        # First of all: `refresh` removes chunks that are not in there.
        self._catalog.add_chunks(chunks, patience_s)
        with self.known.lock:
            for chunk in chunks:
                self.table.add(chunk)

    def register(self, chunks: Sequence[ChunkRecord]) -> None:
        """As `add_chunks`, but never waits long, and never fails; known ones cost nothing.

        Chunks that cannot be written to the catalog now are prefilled as any text.
        """
        self.refresh()  # what another process has removed is made known again
        with self.shelf.spared():
            known = {one.text_digest for one in chunks if self.table.by_digest(one.text_digest)}
            given = known.difference(self._catalog.learned() if known else ())
            self.add_chunks([one for one in chunks if one.text_digest not in given], BRIEFLY_S)

    def learn(self, chunk: ChunkRecord) -> None:
        """As `register`, for a text that nobody gave, but prompts repeat.

        The oldest such texts are forgotten where all of them have too many tokens.
        """
        surplus: list[str] = []
        with self.shelf.spared(), self.known.lock:
            self._catalog.add_chunks([chunk], BRIEFLY_S, learned=True)
            self.table.add(chunk)
            surplus = self.known.surplus()
        if surplus:
            self._remove(surplus)
            self._evictions += 1  # which the catalog has counted as a removal, too

    def remove(self, text_digests: Collection[str], records: Sequence[ChunkRecord] = ()) -> int:
        """Forget texts, and delete all their KV, whichever process encoded it.

        All texts that were learned from prompts go with them, as they may have the same words.

        Args:
            records: those of texts that may not be known here, though prompts had them.

        Returns:
            How many KVs were deleted from this machine.

        Raises:
            StoreError: the files cannot be opened or written, so KV would stay there; or the
                remote store does not answer.
        """
        self.check_kept()
        if not text_digests:
            return 0
        with self.known.lock:
            self._forgets += 1  # who learns a text after the next line takes it back
        return self._remove({*text_digests, *self._catalog.learned()}, records)

    def _remove(self, text_digests: Collection[str], records: Sequence[ChunkRecord] = ()) -> int:
        with self.known.lock:
            self._num_removals += 1
            found = [*records, *filter(None, map(self.table.by_digest, text_digests))]
            chunks = [*{one.text_digest: one for one in found}.values()]
            self.table.discard(chunks)
        try:
            return self._removals.remove(text_digests, records)
        finally:
            self.refresh(force=True)
            self._let_go(chunks)

    def _deletions(self) -> object:
        """Changes whenever KV is deleted because its text is forgotten, by whichever process."""
        return self._num_removals, self.generation

    def knows(self, text_digest: str) -> bool:
        """Whether a text is a chunk, by the catalog, which may know more than this process."""
        return bool(self._catalog.find([text_digest]))

    def _keys(self, chunks: Iterable[ChunkRecord]) -> list[str]:
        """All keys under which the store may have KV of chunks."""
        behinds = {EncodedAfter(()), *self.encoded_after()}
        return [self.shelf.key(behind, chunk.token_ids) for chunk in chunks for behind in behinds]

    def other_makers(self, chunks: Iterable[ChunkRecord]) -> list[Maker]:
        """Other models, or other dtypes of this one, that have KV of these chunks in the store."""
        texts = [chunk.text_digest for chunk in chunks]
        return self.shelf.spare(lambda: self._catalog.makers_of(texts), [])

    def put(self, behind: EncodedAfter, kv: ModuleKV, text_digest: str | None = None) -> None:
        """Keep KV of a chunk, of a prefix, or of a part of a schema; remotely in the background.

        Args:
            behind: what stood before it while it was encoded.
            text_digest: the digest of a chunk's text; None if the KV is not a chunk's. If the
                chunk was removed while it was encoded, its KV is not kept.

        Raises:
            StoreFullError: there is no room.
        """

        def wanted() -> bool:
            return text_digest is None or self.knows(text_digest)

        if not wanted():  # what is forgotten is not even written for a while
            return
        if text_digest is None and behind.context:
            self._catalog.add_other(kv.token_ids, behind.context)
        key, remote = self.shelf.key(behind, kv.token_ids), self.shelf.remote
        self.shelf.store.put(key, kv, Terms(wanted, until_when(self._ttl_seconds)))
        if remote is not None:
            remote.offer(self.namespace, key, kv, wanted)

    def hold(
        self, chunks: Iterable[ChunkRecord], *, pinned: bool | None, until: float | None
    ) -> int:
        """Say how long the KV of chunks is kept; see `KVStore.hold`.

        Raises:
            ConfigError: there is a remote store, and a time.
            StoreError: the files cannot be opened or written, or there are too many pins.
        """
        self.check_kept()
        check_reach(until, is_shared=self.shelf.remote is not None)
        return self.shelf.store.hold(self._keys(chunks), pinned=pinned, until=until)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts into memory, in the encoding with the longest prefix.

        The first text will stand right behind it, where KV without a context is exact.
        """
        missing: list[Wanted] = []
        known = self.encoded_after()
        exact = sorted(known, key=lambda behind: (-len(behind.prefix_ids), bool(behind.context)))
        for place, chunk in enumerate(self.table.get(text.strip()) for text in texts):
            if chunk is None:
                continue
            sources = [(behind, chunk.token_ids) for behind in (known if place else exact)]
            held = next((source for source in sources if self.shelf.holds(*source)), None)
            if held is not None:
                self.shelf.read_ahead(held)
            elif sources:
                missing.append(sources)
        self.shelf.bring_ahead(missing)
