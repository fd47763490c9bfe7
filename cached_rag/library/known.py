"""What a tenant's engines know: texts, which of them were only learned, and what they stood behind.

Knows names, tokens and the names of contexts; knows no KV.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable

from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv.catalog import Catalog, ChunkRecord
from cached_rag.kv.database import BRIEFLY_S
from cached_rag.kv.remote import HEADS_S
from cached_rag.library.matching import ChunkTable, EncodedAfter
from cached_rag.library.shelf import Shelf

# Most tokens of texts that were learned from prompts. A token of a known text takes some 70 bytes.
LEARNED_TOKENS = 1 << 18


class Known:
    """The texts. Where there is no catalog, all libraries of a tenant know the same.

    Texts that nobody gave, but prompts repeat, are learned ones. Where there is a catalog, they are
    marked there, as it knows what other processes were given.

    Attributes:
        table: all texts.
        heads: what they stood behind.
        lock: to be held while texts are changed.
        undeleted: keys whose KV could not be deleted from the remote tier.
        users: number of libraries that use it.
    """

    def __init__(self, shelf: Shelf, catalog: Catalog | None) -> None:
        self.table = ChunkTable()
        self.heads = KnownHeads(shelf, catalog)
        self.lock = threading.Lock()
        self.undeleted: set[str] = set()
        self.users = 0
        self._catalog = catalog
        self._learned: dict[str, None] = {}  # the oldest first, where there is no catalog

    def learned(self) -> list[str]:
        """The digests of learned texts, the oldest first."""
        return list(self._learned) if self._catalog is None else self._catalog.learned()

    def learn(self, chunk: ChunkRecord) -> None:
        """Add a text, and mark it as learned, unless it is known.

        Raises:
            StoreError: the catalog cannot be written.
        """
        if self._catalog is not None:
            self._catalog.add_chunks([chunk], BRIEFLY_S, learned=True)
        elif self.table.by_digest(chunk.text_digest) is None:
            self._learned[chunk.text_digest] = None
        self.table.add(chunk)

    def unmark(self, text_digests: Collection[str]) -> None:
        """Mark texts no more, as somebody gave them, or they are forgotten.

        The catalog does that itself.
        """
        for text_digest in text_digests:
            self._learned.pop(text_digest, None)

    def surplus(self) -> list[str]:
        """The learned texts that go, so that those that stay have at most `LEARNED_TOKENS`."""
        learned = self.learned()
        chunks = [self.table.by_digest(name) for name in learned]
        sizes = [0 if chunk is None else len(chunk.token_ids) for chunk in chunks]
        excess, count = sum(sizes) - LEARNED_TOKENS, 0
        while excess > 0:
            excess -= sizes[count]
            count += 1
        return learned[:count]


class KnownHeads:
    """What one tenant's chunks of one model stood behind. Safe for several threads."""

    def __init__(self, shelf: Shelf, catalog: Catalog | None) -> None:
        self._shelf, self._catalog = shelf, catalog
        self._known: list[EncodedAfter] = []
        self._lock = threading.Lock()
        # When to ask the remote tier again, and what it was told.
        self._due = -math.inf
        self._told: set[EncodedAfter] = set()

    def all(self) -> list[EncodedAfter]:
        """The longest prefix first; of those with the same prefix, the one of the highest rank."""
        return self._known

    def read(self, catalog: Catalog) -> None:
        """Take over what is in the catalog."""
        found = [EncodedAfter(*row) for row in catalog.prefixes()]
        with self._lock:
            self._known = _longest_first(found)

    def add(self, behind: EncodedAfter) -> None:
        """Make known what chunks will be encoded behind, to other machines as well."""
        self._add(behind)
        remote = self._shelf.remote
        if remote is not None and behind not in self._told:
            with self._shelf.spared():
                head = (behind.prefix_ids, behind.context)
                remote.add_heads(self._shelf.namespace, self._shelf.fingerprint, [head])
                self._told.add(behind)

    def _add(self, behind: EncodedAfter) -> None:
        if self._catalog is not None:
            self._catalog.add_prefix(behind.prefix_ids, behind.context)
        with self._lock:
            self._known = _longest_first({*self._known, behind})

    def refresh(self) -> list[str]:
        """Take over what other machines encode chunks behind, now and then.

        Returns:
            Why that failed, for the user; empty if it did not.
        """
        remote = self._shelf.remote
        if remote is None or time.monotonic() < self._due:
            return []
        self._due = time.monotonic() + HEADS_S
        try:
            heads = remote.heads(self._shelf.namespace, self._shelf.fingerprint)
            for new in {EncodedAfter(*head) for head in heads} - {*self._known}:
                self._add(new)
        except CorruptBlobError as error:
            return [str(error)]
        except StoreError as error:
            self._due = -math.inf
            return [str(error)]
        return []


def _longest_first(behinds: Iterable[EncodedAfter]) -> list[EncodedAfter]:
    return sorted(behinds, key=lambda b: (len(b.prefix_ids), b.rank, b.context), reverse=True)
