"""Texts that nobody gave, but prompts repeat: which they are, and which must go for others.

Knows names and numbers of tokens; knows no KV.
"""

from __future__ import annotations

from collections.abc import Collection

from cached_rag.kv.store.catalog import Catalog, ChunkRecord
from cached_rag.kv.store.database import BRIEFLY_S
from cached_rag.library.matching import ChunkTable

# Most tokens of texts that were learned from prompts. A token of a known text takes some 70 bytes.
LEARNED_TOKENS = 1 << 18


class Learned:
    """The learned texts of one library. For one thread at a time.

    Where there is a catalog, they are marked there, as it knows what other processes were given.
    """

    def __init__(self, catalog: Catalog | None, table: ChunkTable) -> None:
        self._catalog, self._table = catalog, table
        self._here: dict[str, None] = {}  # the oldest first, where there is no catalog

    def all(self) -> list[str]:
        """Their digests, the oldest first."""
        return list(self._here) if self._catalog is None else self._catalog.learned()

    def add(self, chunk: ChunkRecord) -> None:
        """Mark a text as learned, unless it is known, and put it into the table.

        Raises:
            StoreError: the catalog cannot be written.
        """
        if self._catalog is not None:
            self._catalog.add_chunks([chunk], BRIEFLY_S, learned=True)
        elif self._table.by_digest(chunk.text_digest) is None:
            self._here[chunk.text_digest] = None
        self._table.add(chunk)

    def discard(self, text_digests: Collection[str]) -> None:
        """Mark texts no more, as somebody gave them, or they are forgotten.

        The catalog does that itself.
        """
        for text_digest in text_digests:
            self._here.pop(text_digest, None)

    def surplus(self) -> list[str]:
        """Those that go, so that those that stay have at most `LEARNED_TOKENS`."""
        learned = self.all()
        chunks = [self._table.by_digest(name) for name in learned]
        sizes = [0 if chunk is None else len(chunk.token_ids) for chunk in chunks]
        excess, count = sum(sizes) - LEARNED_TOKENS, 0
        while excess > 0:
            excess -= sizes[count]
            count += 1
        return learned[:count]
