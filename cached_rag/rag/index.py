"""Documents, chunks and their vectors in one SQLite file; FAISS is built from it in memory.

So no two files can disagree, and what another process writes is found by the next search. Knows no
language model and no KV.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cached_rag.errors import IndexMismatchError, StoreError
from cached_rag.kv.store.base import Problem
from cached_rag.kv.store.database import Database
from cached_rag.kv.store.signed import (
    Row,
    add_column,
    add_sums,
    check,
    has_column,
    is_sound,
    row_sum,
    sound,
)
from cached_rag.rag.document import Metadata
from cached_rag.rag.filters import FIELDS, Where, judge
from cached_rag.rag.hit import Hit
from cached_rag.rag.roots import SCHEMA as _ROOTS
from cached_rag.rag.roots import Roots
from cached_rag.rag.splitting import Chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCHEMA = f"""
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    source TEXT PRIMARY KEY, digest TEXT NOT NULL, title TEXT NOT NULL, is_encoded INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL,
    checksum TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL DEFAULT '{{}}'
);
CREATE INDEX IF NOT EXISTS by_source ON chunks (source);
CREATE INDEX IF NOT EXISTS by_text ON chunks (text);
CREATE TABLE IF NOT EXISTS unneeded (text TEXT PRIMARY KEY);
{_ROOTS}
"""
_OLD = "c.id, d.title, c.ordinal, c.text, c.vector"
_SIGNED = f"{_OLD}, c.metadata"
# Most values that SQLite takes for one query, with much to spare.
_MOST_NAMED = 10_000
_CHUNKS = "FROM chunks c JOIN documents d USING (source)"


def _upgrade(database: Database) -> None:
    add_sums(database, "chunks", f"SELECT {_OLD} {_CHUNKS}")
    add_column(database, "chunks", "metadata", "{}", f"SELECT {_OLD}, c.checksum {_CHUNKS}")


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
        self._database = Database(Path(path), _SCHEMA, _upgrade)
        if self._database.is_read_only and not has_column(self._database, "chunks", "metadata"):
            self._database.close()
            raise StoreError(
                f"{path} was made by an earlier version, and is read-only for this user; open it "
                "once as a user who may write it"
            )
        self.roots = Roots(self._database)
        self._faiss: Any = None
        self._version = -1
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def check(self) -> list[Problem]:
        """What is damaged: the file, or rows of chunks."""
        return check(self._database, {"chunks": f"SELECT {_SIGNED}, c.checksum {_CHUNKS}"})

    def settings(self) -> dict[str, str]:
        """What the index was made with; empty while it has no document."""
        query = "SELECT name, value FROM settings WHERE EXISTS (SELECT 1 FROM documents)"
        return {str(name): str(value) for name, value in self._database.rows(query)}

    def agree(self, asked: Mapping[str, str]) -> dict[str, str]:
        """The index's settings.

        Raises:
            IndexMismatchError: one of those asked for has another value in the index.
        """
        kept = self.settings()
        for name, value in asked.items():
            if kept.get(name, value) != value:
                raise IndexMismatchError(
                    f"the index at {self._folder} was made with {name} {kept[name]!r}, not "
                    f"{value!r}; open it without that setting, or ingest into another folder"
                )
        return kept

    def holds(self, source: str, digest: str) -> bool:
        """Whether a document is indexed with exactly this content, and none of it is damaged."""
        query = "SELECT 1 FROM documents WHERE source = ? AND digest = ?"
        is_known = bool(self._database.rows(query, source, digest))
        return is_known and all(map(is_sound, self._chunks(source)))

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
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, 0)", row)
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
            self._version = -1
            return self._written_off(connection, before)

    def delete(self, source: str) -> list[str]:
        """Delete a document; returns the texts that no chunk has any more, as `replace` does."""
        with self._database.transaction() as connection:
            before = self._texts(source)
            connection.execute("DELETE FROM documents WHERE source = ?", (source,))
            self._version = -1
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
        return [str(row[3]) for row in sound(self._database, self._chunks(source))]

    def all_texts(self) -> list[str]:
        """The texts of all chunks, each once."""
        return self._database.read(str, "SELECT DISTINCT text FROM chunks")

    def count(self) -> tuple[int, int]:
        """Number of documents, and of chunks."""
        query = "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM chunks)"
        (counts,) = self._database.read(lambda documents, chunks: (documents, chunks), query)
        return counts

    def fields(self) -> set[str]:
        """The names of the metadata that chunks have."""
        readable = "CASE WHEN json_valid(metadata) THEN metadata ELSE '{}' END"
        query = f"SELECT DISTINCT key FROM chunks, json_each({readable})"
        return set(self._database.read(str, query))

    def search(self, vector: NDArray[np.float32], k: int, where: Where | None = None) -> list[Hit]:
        """The k chunks nearest to a vector, best first, each text once.

        Args:
            vector: (dim,) float32 of unit length.
            where: which chunks may be among them, see `filters.judge`; None for all.

        Raises:
            ConfigError: a filter by what no chunk has.
        """
        with self._lock:
            index = self._index()
        if index is None:
            return []
        total, options, fits = index.ntotal, {}, None
        if isinstance(where, Mapping):
            ids = self._fitting(where)
            total, options = len(ids), _only(ids)
        elif where is not None:
            fits = where
        hits: dict[str, Hit] = {}
        seen = 0
        while seen < total and len(hits) < k:
            reach = min(total, max(2 * seen, 2 * k))
            scores, ids = index.search(vector[None].astype(np.float32), reach, **options)
            for hit in self._hits(ids[0][seen:].tolist(), scores[0][seen:].tolist()):
                if fits is None or fits(hit):
                    hits.setdefault(hit.text, hit)
            seen = reach
        return list(hits.values())[:k]

    def _fitting(self, where: Mapping[str, object]) -> list[int]:
        """The ids of the chunks that a filter lets through."""
        known = self.fields() if set(where) - set(FIELDS) else set()
        fits = judge(where, known)
        query = f"SELECT c.id, c.source, d.title, c.ordinal, c.metadata {_CHUNKS}"

        def chunk(row: int, source: str, title: str, ordinal: int, metadata: str) -> int:
            hit = Hit("", source, title, ordinal, 0.0, _known(metadata))
            return row if fits(hit) else -1

        return [row for row in self._database.read(chunk, query) if row >= 0]

    def _hits(self, ids: list[int], scores: list[float]) -> Iterator[Hit]:
        """The chunks that have these ids, but for those that are gone or damaged."""
        query = f"SELECT {_SIGNED}, c.checksum, c.source {_CHUNKS} WHERE c.id IN "
        rows: list[Row] = []
        for begin in range(0, len(ids), _MOST_NAMED):
            named = ids[begin : begin + _MOST_NAMED]
            rows += self._database.rows(f"{query}({','.join('?' * len(named))})", *named)
        sources = {row[0]: str(row[-1]) for row in rows}
        by_id = {row[0]: row for row in sound(self._database, (row[:-1] for row in rows))}
        for chunk, score in zip(ids, scores, strict=True):
            if chunk in by_id:  # else deleted by another process since, or damaged
                _, title, ordinal, text, _, known, _ = by_id[chunk]
                place = int(str(ordinal))
                yield Hit(str(text), sources[chunk], str(title), place, score, _known(known))

    def _index(self) -> Any:
        """FAISS over all vectors, built anew if the file has changed; None without vectors."""
        import faiss

        version = self._database.version()
        if version == self._version:
            return self._faiss
        # Vectors that are not as long as most others are damaged.
        rows = self._database.rows(
            "SELECT id, vector FROM chunks WHERE length(vector) = (SELECT length(vector)"
            " FROM chunks GROUP BY 1 ORDER BY count(*) DESC LIMIT 1) AND typeof(vector) = 'blob'"
            " AND length(vector) % 4 = 0"
        )
        self._faiss = None
        if rows:
            vectors = np.stack([np.frombuffer(data, np.float32) for _, data in rows])  # type: ignore[call-overload]
            self._faiss = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._faiss.add_with_ids(vectors, np.array([row for row, _ in rows], np.int64))
        self._version = version
        return self._faiss

    def _chunks(self, source: str) -> list[Row]:
        query = f"SELECT {_SIGNED}, c.checksum {_CHUNKS} WHERE c.source = ? ORDER BY c.ordinal"
        return self._database.rows(query, source)

    def _texts(self, source: str) -> list[str]:
        query = "SELECT text FROM chunks WHERE source = ? ORDER BY ordinal"
        return self._database.read(str, query, source)


def _known(metadata: object) -> Metadata:
    """Metadata as it is kept, in JSON; empty if it was damaged."""
    try:
        known = json.loads(str(metadata))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _only(ids: Sequence[int]) -> dict[str, Any]:
    """Arguments that have FAISS search among these chunks only."""
    import faiss

    chosen = faiss.IDSelectorBatch(np.array(ids, np.int64))
    return {"params": faiss.SearchParameters(sel=chosen)}  # type: ignore[call-arg]
