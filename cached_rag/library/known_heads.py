"""All that chunks were encoded behind, here or by other machines.

Knows tokens and the names of contexts; knows no chunk.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv.store.catalog import Catalog
from cached_rag.kv.store.remote.tier import HEADS_S
from cached_rag.library.matching import EncodedAfter
from cached_rag.library.shelf import Shelf


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
