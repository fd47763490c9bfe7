"""Documents and their vectors in one SQLite file, or in memory. Knows rows; knows no search.

SQLite is the only truth; what is built from it is built again when `version` changes.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from numpy.typing import NDArray

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL, metadata TEXT NOT NULL, vector BLOB NOT NULL,
    module TEXT NOT NULL -- the text without white space around it, by which KV is found
);
CREATE INDEX IF NOT EXISTS by_module ON documents (module);
"""


class DocumentTable:
    """Documents by id. Safe for several threads and, with a file, several processes."""

    def __init__(self, path: Path | None = None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            path or ":memory:", check_same_thread=False, isolation_level=None, timeout=60
        )
        self._connection.executescript(_SCHEMA)
        self._lock = threading.RLock()
        self._writes = 0

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def version(self) -> tuple[int, int]:
        """Differs from an earlier one if anything was written since, by whomever."""
        ((others,),) = self._rows("PRAGMA data_version")
        return self._writes, int(others)

    def width(self) -> int | None:
        """Dimensions of the vectors; None if there are none."""
        found = self._rows("SELECT length(vector) FROM documents LIMIT 1")
        return int(found[0][0]) // np.dtype(np.float32).itemsize if found else None

    def put(self, documents: Sequence[Document], vectors: NDArray[np.float32]) -> list[str]:
        """Add documents; those whose id is taken replace what had it.

        Returns:
            Texts that no document has any more.

        Raises:
            ValueError: metadata that is no JSON.
        """
        rows = [
            (d.id, d.page_content, _json(d), vector.tobytes(), d.page_content.strip())
            for d, vector in zip(documents, vectors, strict=True)
        ]
        ids = [str(document.id) for document in documents]
        with self._transaction():
            before = self._texts(ids)
            columns = "id, text, metadata, vector, module"
            sql = f"INSERT OR REPLACE INTO documents ({columns}) VALUES (?, ?, ?, ?, ?)"
            self._connection.executemany(sql, rows)
            return self._orphans(before)

    def delete(self, ids: Sequence[str] | None) -> list[str]:
        """Drop documents, None for all; returns the texts that no document has any more."""
        if ids is None:
            ids = [str(name) for (name,) in self._rows("SELECT id FROM documents")]
        with self._transaction():
            before = self._texts(ids)
            self._connection.executemany("DELETE FROM documents WHERE id = ?", [(n,) for n in ids])
            return self._orphans(before)

    def by_ids(self, ids: Sequence[str]) -> list[Document]:
        """The documents that are there, in the order of `ids`."""
        found = {document.id: document for _, document in self._select("id", ids)}
        return [found[name] for name in ids if name in found]

    def by_rows(self, rows: Sequence[int]) -> dict[int, Document]:
        """Documents by row; a row may be gone by now."""
        return dict(self._select("row", rows))

    def contents(self) -> tuple[list[int], list[dict[str, Any]], list[NDArray[np.float32]]]:
        """All rows, their metadata, and their vectors."""
        found = self._rows("SELECT row, metadata, vector FROM documents ORDER BY row")
        rows = [int(row) for row, _, _ in found]
        vectors = [np.frombuffer(data, np.float32) for _, _, data in found]
        return rows, [json.loads(text) for _, text, _ in found], vectors

    def copy_to(self, path: Path) -> None:
        """Write all of it to another file, over what is there."""
        with self._lock, closing(sqlite3.connect(path)) as other:
            self._connection.backup(other)

    def _select(self, column: str, values: Sequence[Any]) -> Iterator[tuple[int, Document]]:
        # SQLite bounds the number of parameters, not the length of one.
        sql = (
            "SELECT row, id, text, metadata FROM documents"
            f" WHERE {column} IN (SELECT value FROM json_each(?))"
        )
        for row, name, text, metadata in self._rows(sql, json.dumps(list(values))):
            yield row, Document(text, id=name, metadata=json.loads(metadata))

    def _texts(self, ids: Iterable[str]) -> list[str]:
        return [document.page_content.strip() for document in self.by_ids(list(ids))]

    def _orphans(self, texts: Iterable[str]) -> list[str]:
        query = "SELECT 1 FROM documents WHERE module = ? LIMIT 1"
        return [text for text in dict.fromkeys(texts) if not self._rows(query, text)]

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
            self._writes += 1


def _json(document: Document) -> str:
    try:
        return json.dumps(document.metadata)
    except TypeError as error:
        raise ValueError(
            f"the metadata of document {document.id!r} cannot be kept: {error}; use values that "
            "JSON has"
        ) from error
