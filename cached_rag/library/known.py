"""What a tenant's engines know of texts. Where there is no catalog, all of them know the same."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cached_rag.kv.store.catalog import Catalog
from cached_rag.library.known_heads import KnownHeads
from cached_rag.library.learned import Learned
from cached_rag.library.matching import ChunkTable
from cached_rag.library.shelf import Shelf


@dataclass(eq=False)
class Known:
    """The texts, and what they were encoded behind.

    Attributes:
        lock: held while any of it is changed.
        undeleted: keys whose KV could not be deleted from the remote tier.
        users: number of libraries that use it.
    """

    table: ChunkTable
    heads: KnownHeads
    learned: Learned
    lock: threading.Lock = field(default_factory=threading.Lock)
    undeleted: set[str] = field(default_factory=set)
    users: int = 0

    @classmethod
    def of(cls, shelf: Shelf, catalog: Catalog | None) -> Known:
        """Nothing yet."""
        table = ChunkTable()
        return cls(table, KnownHeads(shelf, catalog), Learned(catalog, table))
