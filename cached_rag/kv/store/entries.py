"""The table of a disk store: which files there are, and in what order they were used.

Knows SQLite; touches no file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from sqlite3 import Connection

from cached_rag.errors import StoreError
from cached_rag.kv.store.database import BRIEFLY_S, PATIENCE_S, Database

_log = logging.getLogger(__name__)
# Its predecessor `blobs` knew the files of versions that left some of their header unsigned.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, codec TEXT NOT NULL, name TEXT NOT NULL, nbytes INTEGER NOT NULL,
    checksum TEXT NOT NULL, last_used INTEGER NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_last_use ON files (last_used);
"""
_SELECT = "SELECT key, codec, name, nbytes, checksum FROM files"
_HAS_OLD = "SELECT count(*) FROM sqlite_master WHERE name = 'blobs'"
# Uses are counted, not timed: clocks go back.
_NOW = "(SELECT coalesce(max(last_used), 0) + 1 FROM files)"
# They are written down in batches, so that a hit costs no transaction.
_USES_KEPT = 64


@dataclass(frozen=True)
class Entry:
    """A file: whose KV it is, and the name, drawn by lot, that tells it from what it replaced.

    Raises:
        ValueError, TypeError: it would name no file of a store.
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
    """The table in an index file. What is written needs a `transaction`."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path, _SCHEMA, _leave_unsigned)
        self._used: dict[tuple[str, str], None] = {}  # in order of use
        self._uses = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Write down recent uses and close the file."""
        self.flush()
        self.database.close()

    def transaction(self, patience_s: float = PATIENCE_S) -> AbstractContextManager[Connection]:
        """See `Database.transaction`."""
        return self.database.transaction(patience_s)

    def nbytes(self) -> int:
        """Bytes of all files."""
        (total,) = self.database.read(int, "SELECT coalesce(sum(nbytes), 0) FROM files")
        return total

    def all(self) -> list[Entry]:
        """Every entry."""
        return self.database.read(Entry, _SELECT)

    def of(self, codec: str) -> list[Entry]:
        """A codec's, least recently used first."""
        self.flush()
        return self.database.read(Entry, f"{_SELECT} WHERE codec = ? ORDER BY last_used", codec)

    def find(self, key: str, codec: str) -> Entry | None:
        """The entry of a key, if there is one."""
        found = self.database.read(Entry, f"{_SELECT} WHERE key = ? AND codec = ?", key, codec)
        return found[0] if found else None

    def of_key(self, key: str) -> list[Entry]:
        """A key's, in every codec."""
        return self.database.read(Entry, f"{_SELECT} WHERE key = ?", key)

    def put(self, connection: Connection, entry: Entry) -> list[Entry]:
        """Add an entry as the latest used; returns the one it replaced."""
        replaced = self.find(entry.key, entry.codec)
        sql = f"INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, {_NOW})"
        connection.execute(sql, astuple(entry))
        return [] if replaced is None else [replaced]

    def remove(self, connection: Connection, entries: Iterable[Entry | None]) -> list[Entry]:
        """Take out just these, not what has replaced them; returns those that were there."""
        sql = "DELETE FROM files WHERE key = ? AND codec = ? AND name = ?"
        return [
            entry
            for entry in entries
            if entry is not None
            and connection.execute(sql, (entry.key, entry.codec, entry.name)).rowcount
        ]

    def evict(self, connection: Connection, max_bytes: int) -> list[Entry]:
        """Take out the least recently used beyond a bound."""
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
        """Write down uses; while another process is in the way, they wait for the next time."""
        with self._lock:
            used, self._used = self._used, {}
        if not used:
            return
        try:
            with self.transaction(BRIEFLY_S) as connection:
                sql = f"UPDATE files SET last_used = {_NOW} WHERE key = ? AND codec = ?"
                connection.executemany(sql, used)
        except StoreError as error:
            _log.info("uses of KV are written down later: %s", error)
            with self._lock:
                self._used = dict.fromkeys([*used, *self._used])


def _leave_unsigned(database: Database) -> None:
    """Forget files of earlier versions: nothing would tell of a change to their positions."""
    if database.read(int, _HAS_OLD) == [0]:
        return
    with database.transaction() as connection:
        if database.read(int, _HAS_OLD) == [0]:  # another process was faster
            return
        (count,) = database.read(int, "SELECT count(*) FROM blobs")
        connection.execute("DROP TABLE blobs")
    if count:
        _log.warning(
            "%d KV files beside %s are of an earlier version, which signed them in part only; "
            "they are computed anew when they are needed, and `cached-rag store prune` removes "
            "them",
            count,
            database.path,
        )
