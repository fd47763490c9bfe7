"""Where one tenant's KV is, by what it was encoded behind: in memory, on disk, on another machine.

Knows keys and tiers; knows no text. Of the model it knows only the fingerprint.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from cachetools import LRUCache

from cached_rag.config import StoreConfig
from cached_rag.errors import CorruptBlobError, StoreError, StoreFullError
from cached_rag.kv.buffer import LayerSource, ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.fingerprint import ids_digest, module_key
from cached_rag.kv.remote import HEADS_S, RemoteTier
from cached_rag.kv.tiers import IsWanted, MemoryStore, Outbox, Prefetcher, Terms, TieredStore
from cached_rag.library.matching import EncodedAfter

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
# Of how many modules that were brought into memory ahead it is remembered where they came from.
_AHEAD = 4096
# Most bytes from the remote tier that wait to be written to disk, and how long closing waits.
_TO_DISK_BYTES, _WRITING_S = 256 << 20, 10.0
# Of fewer tokens, such as a prompt's head, nobody needs to know that they are computed.
_WORTH_A_NOTE = 64
# What was encoded, and behind what.
Source = tuple[EncodedAfter, tuple[int, ...]]
# Something whose KV is wanted: its encodings, best first, one of which is enough.
Wanted = Sequence[Source]


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


KEPT, HARVEST = Origin("kept"), Origin("harvest")


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
        fingerprint: str,
        namespace: str,
        memory: Sequence[MemoryStore],
        disk: DiskStore | None,
        remote: RemoteTier | None,
        deletions: Callable[[], object],
    ) -> None:
        """Put tiers together that are open.

        Args:
            deletions: gives something else whenever KV is deleted because its text is forgotten.
        """
        self.fingerprint, self.namespace = fingerprint, namespace
        self.memory, self.disk, self.remote = tuple(memory), disk, remote
        self.store = TieredStore([*self.memory, *([] if disk is None else [disk])])
        self._deletions = deletions
        self._prefetcher = Prefetcher()
        self._to_disk = Outbox(self._write, _TO_DISK_BYTES)
        self._ahead: LRUCache[str, str] = LRUCache(_AHEAD)
        self._noting = threading.Lock()
        self._told: set[str] = set()
        # When to ask the remote tier again what chunks stand behind.
        self._due = 0.0

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

    def spare(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """What `ask` gives; `otherwise` if the store fails, see `spared`."""
        with self.spared():
            return ask()
        return otherwise

    def key(self, behind: EncodedAfter, token_ids: Sequence[int]) -> str:
        """The key under which the store has the KV of these tokens, encoded behind that."""
        return module_key(
            self.fingerprint, behind.prefix_ids, token_ids, self.namespace, behind.context
        )

    def holds(self, behind: EncodedAfter, token_ids: Sequence[int]) -> bool:
        """Whether KV of these tokens, encoded behind that, is on this machine.

        False if the store fails.
        """
        return self.spare(lambda: self.key(behind, token_ids) in self.store, False)

    def delete(self, key: str) -> bool:
        """Delete KV from this machine; says whether there was any."""
        self._to_disk.drop([key])
        return self.store.delete(key)

    def tell(self, behind: EncodedAfter) -> None:
        """Have other machines look for KV that was encoded behind that."""
        if self.remote is not None:  # which may have lost what it was told before
            with self.spared():
                self.remote.add_heads(self.namespace, self.fingerprint, [behind])

    def told(self) -> list[EncodedAfter]:
        """What other machines encode chunks behind, if it is time to ask for that.

        Raises:
            StoreError: the remote tier does not answer, or what it has is damaged.
        """
        if self.remote is None or time.monotonic() < self._due:
            return []
        self._due = time.monotonic() + HEADS_S
        try:
            heads = self.remote.heads(self.namespace, self.fingerprint)
        except StoreError as error:
            if not isinstance(error, CorruptBlobError):
                self._due = 0.0
            raise
        return [EncodedAfter(*head) for head in heads]

    def memory_bytes(self) -> int:
        """Bytes of KV in memory: the host's and a CUDA device's together."""
        return sum(tier.nbytes for tier in self.memory)

    def store_bytes(self) -> int:
        """Bytes of KV in this machine's slowest tier; 0 if its index cannot be read (logged)."""
        return self.spare(lambda: self.store.nbytes, 0)

    def fetch(self, behind: EncodedAfter, token_ids: Sequence[int]) -> ModuleKV | None:
        """KV of these tokens; None if there is none, or it cannot be read (which is logged).

        If `read_ahead` is reading it already, this waits for that.
        """
        key = self.key(behind, token_ids)
        self._prefetcher.wait((key,))
        return self._get(key, token_ids)

    def _get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        return self.spare(lambda: self.store.get(key, token_ids), None)

    def best_encoding(
        self, behinds: Sequence[EncodedAfter], token_ids: Sequence[int], *, lazy: bool
    ) -> tuple[EncodedAfter, LayerSource, Origin] | None:
        """The first of several encodings of a chunk that has KV, with this KV.

        Args:
            behinds: what the chunk may have been encoded behind, best first.
            lazy: KV on disk is only opened, and read layer by layer when it is used.
        """
        read: Callable[..., LayerSource | None] = self.store.open if lazy else self.store.get
        for behind in behinds:
            key = self.key(behind, token_ids)
            tier, began = self._tier(key), time.perf_counter()
            if not lazy:
                self._prefetcher.wait((key,))
            kv = self.spare(partial(read, key, token_ids), None)
            if kv is not None:
                taken = None if lazy else (time.perf_counter() - began) * 1000
                return behind, kv, Origin(tier, taken)
        return None

    def _tier(self, key: str) -> str:
        """The tier that KV comes from now, if there is any; see `Origin`."""
        with self._noting:
            ahead = self._ahead.pop(key, None)
        return ahead or ("memory" if any(key in tier for tier in self.memory) else "disk")

    def _came_from(self, key: str, tier: str) -> None:
        with self._noting:
            self._ahead[key] = tier

    def read_ahead(self, source: Source) -> None:
        """Begin to read KV into the fastest memory."""
        key = self.key(*source)
        if key not in self.memory[0]:
            self._came_from(key, "ahead")
            self._prefetcher.start((key,), partial(self._get, key, source[1]))

    def bring_ahead(self, wanted: Sequence[Wanted]) -> None:
        """Begin to `bring` KV."""
        if self.remote is not None and wanted:
            self._prefetcher.start([*map(_name, wanted)], partial(self._bring, wanted))

    def bring(self, wanted: Sequence[Wanted]) -> list[str]:
        """Bring what is not on this machine from the remote tier, if that is worth it.

        Afterwards the KV is in memory, if there is room. That takes one round trip where the remote
        tier has the best encoding of everything, and three at most; and waits for what is on its
        way already.

        Returns:
            Notes for the user. A remote tier that fails costs a note, and its KV is computed.
        """
        self._prefetcher.wait(map(_name, wanted))
        return self._bring(wanted)

    def _bring(self, wanted: Sequence[Wanted]) -> list[str]:
        missing = [one for one in wanted if not any(self.holds(*source) for source in one)]
        if self.remote is None or not missing:
            return []
        taken, tokens = missing, sum(map(_length, missing))
        if self.remote.refuses(tokens):
            # One of them tells now and then whether the way has become faster.
            short = min(missing, key=lambda one: abs(_length(one) - _WORTH_A_NOTE))
            taken = [short] if self.remote.link.is_stale else []
        left = tokens - sum(map(_length, taken))
        notes = [self.remote.refuses(left)] if left >= _WORTH_A_NOTE else []
        try:
            found = self._bring_missing(self.remote, taken)
        except StoreError as error:
            found = [str(error)]
        return [note for note in (*notes, *found) if note]

    def _bring_missing(self, remote: RemoteTier, missing: Sequence[Wanted]) -> list[str]:
        best = {self.key(*one[0]): one for one in missing}
        notes, found = self._bring_keys(remote, {key: one[0] for key, one in best.items()})
        others = {
            self.key(*source): source
            for key, one in best.items()
            if key not in found
            for source in one[1:]
        }
        held = remote.holds(self.namespace, others)
        chosen: dict[tuple[int, ...], str] = {}
        for key, (_, ids) in others.items():  # in order, the best first
            if key in held:
                chosen.setdefault(ids, key)
        more, _ = self._bring_keys(remote, {key: others[key] for key in chosen.values()})
        return [*notes, *more]

    def _bring_keys(
        self, remote: RemoteTier, sources: dict[str, Source]
    ) -> tuple[list[str], set[str]]:
        """Bring KV into memory now, and onto the disk in a while.

        If texts were forgotten meanwhile, the KV may be theirs, and is not kept.

        Returns:
            What was wrong with some, and the keys of what came.
        """
        deletions = self._deletions()
        wanted_ids = {key: ids for key, (_, ids) in sources.items()}
        found, problems = remote.fetch(self.namespace, wanted_ids)

        def wanted() -> bool:
            return deletions == self._deletions()

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
        return problems, set(found)

    def _write(self, key: str, kv: ModuleKV, wanted: IsWanted) -> bool:
        assert self.disk is not None
        with self.spared():
            self.disk.put(key, kv, Terms(wanted))
        return True

    def close(self) -> None:
        """Finish reading ahead, and release files. The remote tier is its owner's to close."""
        self._prefetcher.close()
        self._to_disk.close(_WRITING_S)
        if self.disk is not None:
            self.disk.close()


def _length(one: Wanted) -> int:
    """How many tokens it has, however it was encoded."""
    return len(one[0][1])


def _name(one: Wanted) -> str:
    """What the prefetcher calls it, however it was encoded."""
    return ids_digest(one[0][1])


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
