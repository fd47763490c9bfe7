"""Which node has which text, so that a deleted node's KV can be forgotten. Knows rows only."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    id TEXT PRIMARY KEY, document TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_document ON nodes (document);
CREATE INDEX IF NOT EXISTS by_text ON nodes (text);
"""


class Ledger:
    """Nodes by id, in a file or in memory. What is removed comes back as texts nobody has now."""

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            path or ":memory:", check_same_thread=False, isolation_level=None, timeout=60
        )
        self._connection.executescript(_SCHEMA)
        self._lock = threading.RLock()

    def put(self, nodes: Iterable[tuple[str, str, str]]) -> list[str]:
        """Add (id, document, text) rows, or replace those with the same ids."""
        rows = list(nodes)
        ids = json.dumps([name for name, _, _ in rows])
        with self._lock, self._connection:
            before = self._matching("id IN (SELECT value FROM json_each(?))", ids)
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?)", rows)
            return self._orphans(before)

    def remove_nodes(self, ids: Iterable[str]) -> list[str]:
        """Drop nodes."""
        return self._remove("id IN (SELECT value FROM json_each(?))", json.dumps(list(ids)))

    def remove_document(self, document: str) -> list[str]:
        """Drop a document's nodes."""
        return self._remove("document = ?", document)

    def clear(self) -> list[str]:
        """Drop all."""
        return self._remove("id IS NOT ?", None)

    def texts(self, ids: Iterable[str]) -> list[str]:
        """The texts of nodes that are there."""
        with self._lock:
            return self._matching("id IN (SELECT value FROM json_each(?))", json.dumps(list(ids)))

    def _remove(self, condition: str, value: str | None) -> list[str]:
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            before = self._matching(condition, value)
            self._connection.execute(f"DELETE FROM nodes WHERE {condition}", (value,))
            return self._orphans(before)

    def _matching(self, condition: str, value: str | None) -> list[str]:
        sql = f"SELECT text FROM nodes WHERE {condition}"
        return [str(text) for (text,) in self._connection.execute(sql, (value,))]

    def _orphans(self, texts: list[str]) -> list[str]:
        sql = "SELECT 1 FROM nodes WHERE text = ? LIMIT 1"
        found = self._connection.execute
        return [t for t in dict.fromkeys(texts) if found(sql, (t,)).fetchone() is None]
