"""The table of a disk store: its files, and the order in which they were last used.

Knows SQLite; touches no file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from sqlite3 import Connection

from cached_rag.errors import StoreError
from cached_rag.kv.database import BRIEFLY_S, Database

_log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, codec TEXT NOT NULL, name TEXT NOT NULL, nbytes INTEGER NOT NULL,
    checksum TEXT NOT NULL, last_used INTEGER NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_last_use ON files (last_used);
"""
_SELECT = "SELECT key, codec, name, nbytes, checksum FROM files"
# Uses are counted, not timed: clocks go back.
_NOW = "(SELECT coalesce(max(last_used), 0) + 1 FROM files)"
# Uses are written down in batches, so that not every hit costs a transaction.
_USES_KEPT = 64


@dataclass(frozen=True)
class Entry:
    """A file of the store.

    Attributes:
        key: the module's.
        name: drawn at random, so that it differs from any file that this one replaced.
        nbytes: the file's size.
        checksum: of its header and token ids, see `write_blob`.

    Raises:
        ValueError, TypeError: the row is damaged, and could lead out of the store.
    """

    key: str
    codec: str
    name: str
    nbytes: int
    checksum: str

    def __post_init__(self) -> None:
        if not f"{self.key}{self.codec}{self.name}".isalnum():  # they make a path
            raise ValueError("a row names no file")
        if not isinstance(self.nbytes, int):
            raise TypeError("a row has no size")


class Entries:
    """The table in an index file. Methods that take a connection belong in a transaction."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path, _SCHEMA)
        self._used: dict[tuple[str, str], None] = {}  # in order of use
        self._uses = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Write down which entries were used lately, and close the file."""
        self.flush()
        self.database.close()

    def nbytes(self) -> int:
        """Bytes of all files."""
        (total,) = self.database.read(int, "SELECT coalesce(sum(nbytes), 0) FROM files")
        return total

    def all(self) -> list[Entry]:
        """All entries, of all codecs."""
        return self.database.read(Entry, _SELECT)

    def find(self, key: str, codec: str) -> Entry | None:
        """A key's entry in a codec, or None."""
        found = self.database.read(Entry, f"{_SELECT} WHERE key = ? AND codec = ?", key, codec)
        return found[0] if found else None

    def of_key(self, key: str) -> list[Entry]:
        """A key's entries, in all codecs."""
        return self.database.read(Entry, f"{_SELECT} WHERE key = ?", key)

    def put(self, connection: Connection, entry: Entry) -> None:
        """Add an entry, as the last used, in place of the key's other one in the codec."""
        sql = f"INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, {_NOW})"
        connection.execute(sql, astuple(entry))

    def remove(self, connection: Connection, entries: Iterable[Entry]) -> list[Entry]:
        """Take out entries, but none that has replaced them; returns those that were there."""
        sql = "DELETE FROM files WHERE key = ? AND codec = ? AND name = ?"
        return [
            entry
            for entry in entries
            if connection.execute(sql, (entry.key, entry.codec, entry.name)).rowcount
        ]

    def evict(self, connection: Connection, max_bytes: int) -> list[Entry]:
        """Take out the least recently used entries until `max_bytes` are left; returns them."""
        excess = self.nbytes() - max_bytes
        gone: list[Entry] = []
        oldest = f"{_SELECT} ORDER BY last_used LIMIT 1"
        while excess > 0 and (found := self.database.read(Entry, oldest)):
            gone += self.remove(connection, found)
            excess -= found[0].nbytes
        return gone

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        with self._lock:
            use = (entry.key, entry.codec)
            self._used.pop(use, None)
            self._used[use] = None
            self._uses += 1
            is_due = self._uses % _USES_KEPT == 0
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write down uses; if another process is in the way, they wait for the next time."""
        with self._lock:
            used, self._used = self._used, {}
        if not used:
            return
        try:
            with self.database.transaction(BRIEFLY_S) as connection:
                sql = f"UPDATE files SET last_used = {_NOW} WHERE key = ? AND codec = ?"
                connection.executemany(sql, used)
        except StoreError as error:
            _log.info("uses of KV are written down later: %s", error)
            with self._lock:
                self._used = dict.fromkeys([*used, *self._used])
