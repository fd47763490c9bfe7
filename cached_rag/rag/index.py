"""Documents, chunks and their vectors in one SQLite file, so that no two files can disagree.

`Search` finds chunks in it. Knows no language model and no KV.
"""

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cached_rag.errors import IndexMismatchError
from cached_rag.kv.database import Database, Problem, Row, is_sound, row_sum
from cached_rag.rag.chunks import Chunk, Embeddings, embedded
from cached_rag.rag.finding import ROOTS, Roots
from cached_rag.rag.search import CHUNKS, SIGNED, Search

_log = logging.getLogger(__name__)
# How many chunks' vectors are compared with those that the embedding model makes.
_COMPARED = 3
# Most distance between a text's vectors by one model, on other devices and in other dtypes, too; of
# unit vectors it is a cosine of .999.
_SAME = 0.045
# Settings of a model that an index remembers; its KV is of another model if they change.
RECALLED = ("backend", "dtype", "weights", "revision", "adapter")
# Settings that an index remembers, and that may be others each time: those that decide whose KV
# serves, and how chunks are found.
CHANGEABLE = (*RECALLED, "search")
# Settings that may name a folder or a file, which is moved now and then.
_MODELS = ("model", "embedding")
# All chunks, each as a signed row.
_ROWS = f"SELECT {SIGNED}, c.checksum {CHUNKS}"
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
{ROOTS}
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
        self.search = self._search.nearest

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def check(self) -> list[Problem]:
        """What is damaged: the file, or rows of chunks."""
        return self._database.check({"chunks": _ROWS})

    def settings(self) -> dict[str, str]:
        """What the index was made with; empty while it has no document."""
        query = "SELECT name, value FROM settings WHERE EXISTS (SELECT 1 FROM documents)"
        return {str(name): str(value) for name, value in self._database.rows(query)}

    def agree(self, asked: Mapping[str, str]) -> dict[str, str]:
        """The index's settings.

        Raises:
            IndexMismatchError: one of those asked for has another value in the index, and is none
                of those that each `open` may choose anew, nor a path where nothing is any more.
        """
        kept = self.settings()
        for name, value in asked.items():
            before = kept.get(name, value)
            may_move = name in _MODELS and Path(before).is_absolute()
            is_gone = may_move and not Path(before).exists()
            if name not in CHANGEABLE and before != value and not is_gone:
                raise IndexMismatchError(
                    f"the index at {self._folder} was made with {name} {kept[name]!r}, not "
                    f"{value!r}; open it again without that setting, or ingest into another folder"
                )
        return kept

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
        """Write down of which file a document was read; see `finding.stamp`."""
        with self._database.transaction() as connection:
            sql = "UPDATE documents SET stamp = ? WHERE source = ? AND stamp != ?"
            connection.execute(sql, (stamp, source, stamp))

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
            rows = []
            for chunk, vector in zip(chunks, vectors, strict=True):
                data, known = vector.astype(np.float32).tobytes(), json.dumps(chunk.metadata)
                values = (chunk.ordinal, chunk.text, data, known)
                rows.append((source, *values, row_sum(title, *values)))
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

    def see_vectors_of(self, embedder: Embeddings) -> None:
        """Embed all chunks again, unless the last ones have the vectors they would get.

        A model's files may be replaced under the same name. Vectors of two models have nothing to
        do with each other: a search would find the wrong chunks, and nothing would fail.

        Raises:
            IndexMismatchError: they have others, and this user may not write the index.
            ConfigError: see `embedded`.
        """
        query = f"{_ROWS} ORDER BY c.id DESC LIMIT ?"
        rows = list(filter(is_sound, self._database.rows(query, _COMPARED)))
        if not rows:
            return
        found = embedded(embedder, [str(row[3]) for row in rows])
        kept = (np.frombuffer(row[4], np.float32) for row in rows)  # type: ignore[call-overload]
        if all(map(_is_same, kept, found)):
            return
        if self._database.is_read_only:
            raise IndexMismatchError(
                f"the embedding model {embedder.name} is not the one that this index was made "
                "with, and the index is read-only for this user: let one who may write it open it "
                "once, which embeds its chunks anew"
            )
        _log.warning(
            "the embedding model %s is not the one that this index was made with: its %d chunks "
            "are embedded anew",
            *(embedder.name, self.count()[1]),
        )
        self._embed_again(embedder)

    def _embed_again(self, embedder: Embeddings) -> None:
        """Give all chunks other vectors, in one transaction; damaged ones keep theirs."""
        rows = list(filter(is_sound, self._database.rows(f"{_ROWS} ORDER BY c.id")))
        vectors = embedded(embedder, [str(row[3]) for row in rows])
        changed = []
        for (chunk, title, ordinal, text, _, known, _), vector in zip(rows, vectors, strict=True):
            data = vector.astype(np.float32).tobytes()
            changed.append((data, row_sum(title, ordinal, text, data, known), chunk))
        with self._database.transaction() as connection:
            sql = "UPDATE chunks SET vector = ?, checksum = ? WHERE id = ?"
            connection.executemany(sql, changed)
            self._search.forget()

    def _chunks(self, source: str) -> list[Row]:
        return self._database.rows(f"{_ROWS} WHERE c.source = ? ORDER BY c.ordinal", source)

    def _texts(self, source: str) -> list[str]:
        query = "SELECT text FROM chunks WHERE source = ? ORDER BY ordinal"
        return self._database.read(str, query, source)


def _is_same(old: NDArray[np.float32], new: NDArray[np.float32]) -> bool:
    return old.shape == new.shape and float(np.linalg.norm(old - new)) <= _SAME
