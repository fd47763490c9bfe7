"""Documents, chunks and their vectors in one SQLite file, so that no two files can disagree.

`Search` finds chunks in it. Knows no language model and no KV.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cached_rag.errors import IndexMismatchError
from cached_rag.kv.store.database import Database, Problem, Row, is_sound, row_sum
from cached_rag.rag.embedding import EMBED_CHUNKS, Embeddings
from cached_rag.rag.filters import Where
from cached_rag.rag.hit import Hit
from cached_rag.rag.roots import SCHEMA as _ROOTS
from cached_rag.rag.roots import Roots
from cached_rag.rag.search import CHUNKS, SIGNED, Search
from cached_rag.rag.settings import RECALLED
from cached_rag.rag.splitting import Chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Settings that an index remembers, and that may be others each time: those that decide whose KV
# serves, and how chunks are found.
_CHANGEABLE = (*RECALLED, "search")
_SCHEMA = f"""
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    source TEXT PRIMARY KEY, digest TEXT NOT NULL, title TEXT NOT NULL, is_encoded INTEGER NOT NULL,
    stamp TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL,
    checksum TEXT NOT NULL, metadata TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_source ON chunks (source);
CREATE INDEX IF NOT EXISTS by_text ON chunks (text);
CREATE TABLE IF NOT EXISTS unneeded (text TEXT PRIMARY KEY);
{_ROOTS}
"""


@dataclass(frozen=True)
class IndexedDocument:
    """A document of an index.

    Attributes:
        source: its name in the index, see `CachedRAG.ingest`.
        chunks: number of its chunks.
        is_encoded: whether an ingestion has prefilled all of them.
    """

    source: str
    title: str
    chunks: int
    is_encoded: bool


class DocumentIndex:
    """Documents and chunks of one index folder, and the search among them."""

    def __init__(self, path: Path | str) -> None:
        self._folder = Path(path).parent
        self._database = Database(Path(path), _SCHEMA)
        self.roots = Roots(self._database)
        self._search = Search(self._database)

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def check(self) -> list[Problem]:
        """What is damaged: the file, or rows of chunks."""
        return self._database.check({"chunks": f"SELECT {SIGNED}, c.checksum {CHUNKS}"})

    def settings(self) -> dict[str, str]:
        """What the index was made with; empty while it has no document."""
        query = "SELECT name, value FROM settings WHERE EXISTS (SELECT 1 FROM documents)"
        return {str(name): str(value) for name, value in self._database.rows(query)}

    def agree(self, asked: Mapping[str, str]) -> dict[str, str]:
        """The index's settings.

        Raises:
            IndexMismatchError: one of those asked for has another value in the index, and is none
                of those that each `open` may choose anew.
        """
        kept = self.settings()
        for name, value in asked.items():
            if name not in _CHANGEABLE and kept.get(name, value) != value:
                raise IndexMismatchError(
                    f"the index at {self._folder} was made with {name} {kept[name]!r}, not "
                    f"{value!r}; open it without that setting, or ingest into another folder"
                )
        return kept

    def holds(self, source: str, digest: str) -> bool:
        """Whether a document is indexed with exactly this content, and none of it is damaged."""
        return self.digest(source) == digest

    def digest(self, source: str) -> str:
        """The digest a document was indexed with; "" if it is not, or any of it is damaged."""
        query = "SELECT digest FROM documents WHERE source = ?"
        found = self._database.read(str, query, source)
        return found[0] if found and all(map(is_sound, self._chunks(source))) else ""

    def is_as_stamped(self, source: str, stamp: str) -> bool:
        """Whether a document was read from a file of this stamp, and none of it is damaged."""
        found = self._database.read(str, "SELECT stamp FROM documents WHERE source = ?", source)
        return bool(stamp) and found == [stamp] and self.digest(source) != ""

    def put_stamp(self, source: str, stamp: str) -> None:
        """Write down of which file a document was read; see `seen.py`."""
        with self._database.transaction() as connection:
            sql = "UPDATE documents SET stamp = ? WHERE source = ? AND stamp != ?"
            connection.execute(sql, (stamp, source, stamp))

    def sources(self) -> list[str]:
        """The names of all documents, sorted."""
        return self._database.read(str, "SELECT source FROM documents ORDER BY source")

    def documents(self) -> list[IndexedDocument]:
        """All documents, sorted by source."""
        query = (
            "SELECT source, title, (SELECT count(*) FROM chunks c WHERE c.source = d.source),"
            " is_encoded FROM documents d ORDER BY source"
        )

        def document(source: str, title: str, chunks: int, is_encoded: int) -> IndexedDocument:
            return IndexedDocument(str(source), str(title), chunks, bool(is_encoded))

        return self._database.read(document, query)

    def replace(
        self,
        source: str,
        digest: str,
        chunks: Sequence[Chunk],
        vectors: NDArray[np.float32],
        settings: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Put a document's chunks in place of its old ones, in one transaction.

        The document counts as not encoded until `mark_encoded`.

        Args:
            vectors: (len(chunks), dim) float32, each of unit length.
            settings: what the chunks were made with; the first document's become the index's.

        Returns:
            Texts that no chunk has any more; they are `unneeded` until `forgotten` says otherwise.

        Raises:
            IndexMismatchError: the index was made with other settings.
        """
        with self._database.transaction() as connection:
            if not self.agree(settings or {}):
                connection.execute("DELETE FROM settings")  # of an index that was emptied
            sql = "INSERT OR IGNORE INTO settings VALUES (?, ?)"
            connection.executemany(sql, (settings or {}).items())
            before = self._texts(source)
            connection.execute("DELETE FROM documents WHERE source = ?", (source,))
            title = chunks[0].title if chunks else source
            row = (source, digest, title)
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, 0, '')", row)
            found = [
                (
                    *(chunk.ordinal, chunk.text, vector.astype(np.float32).tobytes()),
                    json.dumps(chunk.metadata),
                )
                for chunk, vector in zip(chunks, vectors, strict=True)
            ]
            rows = [(source, *values, row_sum(title, *values)) for values in found]
            columns = "source, ordinal, text, vector, metadata, checksum"
            sql = f"INSERT INTO chunks ({columns}) VALUES (?, ?, ?, ?, ?, ?)"
            connection.executemany(sql, rows)
            self._search.forget()
            return self._written_off(connection, before)

    def delete(self, source: str) -> list[str]:
        """Delete a document; returns the texts that no chunk has any more, as `replace` does."""
        with self._database.transaction() as connection:
            before = self._texts(source)
            connection.execute("DELETE FROM documents WHERE source = ?", (source,))
            self._search.forget()
            return self._written_off(connection, before)

    def _written_off(self, connection: sqlite3.Connection, texts: Iterable[str]) -> list[str]:
        """Those of these texts that no chunk has; writes down that their KV has to be deleted."""
        found = self.orphans(texts)
        sql = "INSERT OR IGNORE INTO unneeded VALUES (?)"
        connection.executemany(sql, [(text,) for text in found])
        return found

    def orphans(self, texts: Iterable[str]) -> list[str]:
        """Those of these texts that no chunk has."""
        query = "SELECT 1 FROM chunks WHERE text = ? LIMIT 1"
        return [text for text in dict.fromkeys(texts) if not self._database.rows(query, text)]

    def unneeded(self) -> list[str]:
        """Texts that no chunk has any more, and whose KV may still be there."""
        return self.orphans(self._database.read(str, "SELECT text FROM unneeded"))

    def forgotten(self, texts: Iterable[str]) -> None:
        """Strike these texts off the list of `unneeded`: their KV is gone, or needed again."""
        with self._database.transaction() as connection:
            sql = "DELETE FROM unneeded WHERE text = ?"
            connection.executemany(sql, [(text,) for text in texts])
        self._database.scrub()

    def mark_encoded(self, source: str) -> None:
        """Write down that the KV of all chunks of a document is in the store."""
        with self._database.transaction() as connection:
            sql = "UPDATE documents SET is_encoded = 1 WHERE source = ?"
            connection.execute(sql, (source,))

    def pending(self) -> list[str]:
        """Documents that are not marked as encoded: what an interrupted ingestion left."""
        query = "SELECT source FROM documents WHERE NOT is_encoded ORDER BY source"
        return self._database.read(str, query)

    def texts(self, source: str) -> list[str]:
        """The texts of a document's chunks, in order; damaged ones are left out, and logged."""
        return [str(row[3]) for row in self._database.sound(self._chunks(source))]

    def all_texts(self) -> list[str]:
        """The texts of all chunks, each once."""
        return self._database.read(str, "SELECT DISTINCT text FROM chunks")

    def count(self) -> tuple[int, int]:
        """Number of documents, and of chunks."""
        query = "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM chunks)"
        (counts,) = self._database.read(lambda documents, chunks: (documents, chunks), query)
        return counts

    @property
    def is_read_only(self) -> bool:
        """Whether this user may not write it."""
        return self._database.is_read_only

    def last_vectors(self, count: int) -> dict[str, NDArray[np.float32]]:
        """The texts that came last, each with its vector; damaged ones are left out."""
        query = f"SELECT {SIGNED}, c.checksum {CHUNKS} ORDER BY c.id DESC LIMIT ?"
        rows = filter(is_sound, self._database.rows(query, count))
        return {str(row[3]): np.frombuffer(row[4], np.float32) for row in rows}  # type: ignore[call-overload]

    def embed_again(self, embedder: Embeddings) -> None:
        """Give all chunks other vectors, in one transaction; damaged ones keep theirs."""
        query = f"SELECT {SIGNED}, c.checksum {CHUNKS} ORDER BY c.id"
        rows = list(filter(is_sound, self._database.rows(query)))
        changed = []
        for begin in range(0, len(rows), EMBED_CHUNKS):
            some = rows[begin : begin + EMBED_CHUNKS]
            vectors = embedder.embed([str(row[3]) for row in some])
            for (chunk, title, ordinal, text, _, known, _), vector in zip(
                some, vectors, strict=True
            ):
                data = vector.astype(np.float32).tobytes()
                changed.append((data, row_sum(title, ordinal, text, data, known), chunk))
        with self._database.transaction() as connection:
            sql = "UPDATE chunks SET vector = ?, checksum = ? WHERE id = ?"
            connection.executemany(sql, changed)
            self._search.forget()

    def search(
        self,
        vector: NDArray[np.float32],
        k: int,
        where: Where | None = None,
        *,
        text: str = "",
        by: str = "vectors",
    ) -> list[Hit]:
        """See `Search.nearest`."""
        return self._search.nearest(vector, k, where, text=text, by=by)

    def _chunks(self, source: str) -> list[Row]:
        query = f"SELECT {SIGNED}, c.checksum {CHUNKS} WHERE c.source = ? ORDER BY c.ordinal"
        return self._database.rows(query, source)

    def _texts(self, source: str) -> list[str]:
        query = "SELECT text FROM chunks WHERE source = ? ORDER BY ordinal"
        return self._database.read(str, query, source)
