"""The table of a disk store: its files, and the order in which they leave (see `eviction.py`).

Knows SQLite; touches no file.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from sqlite3 import Connection

from cached_rag.errors import StoreError, StoreFullError
from cached_rag.kv.database import BRIEFLY_S, Database
from cached_rag.kv.eviction import MOST_USES, NO_ROOM, SMALL_SHARE

_log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, codec TEXT NOT NULL, name TEXT NOT NULL, nbytes INTEGER NOT NULL,
    checksum TEXT NOT NULL, is_main INTEGER NOT NULL, turn INTEGER NOT NULL, uses INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_turn ON files (is_main, turn);
CREATE TABLE IF NOT EXISTS gone (
    key TEXT NOT NULL, codec TEXT NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
"""
_SELECT = "SELECT key, codec, name, nbytes, checksum FROM files"
# Turns are counted, not timed: clocks go back.
_NOW = "(SELECT coalesce(max(turn), 0) + 1 FROM files)"
_THIS = "key = ? AND codec = ?"
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
        self._used = Counter[tuple[str, str]]()
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
        found = self.database.read(Entry, f"{_SELECT} WHERE {_THIS}", key, codec)
        return found[0] if found else None

    def of_key(self, key: str) -> list[Entry]:
        """A key's entries, in all codecs."""
        return self.database.read(Entry, f"{_SELECT} WHERE key = ?", key)

    def put(
        self, connection: Connection, entry: Entry, max_bytes: int | None = None
    ) -> list[Entry]:
        """Add an entry, as the last of its queue; returns those that it replaces or pushes out.

        Raises:
            StoreFullError: what is pinned leaves too little room.
        """
        this = (entry.key, entry.codec)
        replaced = self.database.read(Entry, f"{_SELECT} WHERE {_THIS}", *this)
        standing = f"SELECT is_main, uses, pinned FROM files WHERE {_THIS}"
        before = self.database.rows(standing, *this)
        is_back = connection.execute(f"DELETE FROM gone WHERE {_THIS}", this).rowcount
        is_main, uses, pinned = before[0] if before else (is_back, 0, 0)
        gone = self.remove(connection, replaced)
        if max_bytes is not None:
            gone += self.evict(connection, max_bytes, entry.nbytes)
        sql = f"INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, {_NOW}, ?, ?)"
        connection.execute(sql, (*astuple(entry), is_main, uses, pinned))
        return gone

    def remove(self, connection: Connection, entries: Iterable[Entry]) -> list[Entry]:
        """Take out entries, but none that has replaced them; returns those that were there."""
        sql = "DELETE FROM files WHERE key = ? AND codec = ? AND name = ?"
        return [
            entry
            for entry in entries
            if connection.execute(sql, (entry.key, entry.codec, entry.name)).rowcount
        ]

    def delete(self, connection: Connection, key: str) -> list[Entry]:
        """Take out a key's entries, and forget that there were any; returns them."""
        connection.execute("DELETE FROM gone WHERE key = ?", (key,))
        return self.remove(connection, self.of_key(key))

    def evict(self, connection: Connection, max_bytes: int, room: int = 0) -> list[Entry]:
        """Take out entries until `max_bytes` are left, less some room; returns them.

        Raises:
            StoreFullError: room is asked for, and what is pinned leaves too little.
        """
        excess, gone = self.nbytes() + room - max_bytes, list[Entry]()
        small = "SELECT coalesce(sum(nbytes), 0) FROM files WHERE NOT is_main AND NOT pinned"
        oldest = f"{_SELECT} WHERE is_main = ? AND NOT pinned ORDER BY turn LIMIT 1"
        while excess > 0:
            is_small = self.database.read(int, small)[0] >= SMALL_SHARE * max_bytes
            queues = [self.database.read(Entry, oldest, is_main) for is_main in (0, 1)]
            found = queues[not is_small] or queues[is_small]
            if not found and room:
                held = self.nbytes()
                raise StoreFullError(NO_ROOM.format(held=held, max_bytes=max_bytes))
            if not found:
                break
            if not self._goes_on(connection, found[0]):
                gone += self.remove(connection, found)
                excess -= found[0].nbytes
        return gone

    def _goes_on(self, connection: Connection, entry: Entry) -> bool:
        """Whether an entry whose turn it is was used, and so gets another one in the main queue."""
        used = f"UPDATE files SET uses = (uses - 1) * is_main, is_main = 1, turn = {_NOW}"
        if connection.execute(f"{used} WHERE {_THIS} AND uses", (entry.key, entry.codec)).rowcount:
            return True
        self._remember(connection, entry)
        return False

    def _remember(self, connection: Connection, entry: Entry) -> None:
        """Note what leaves the small queue: the last ones, as many as there are files."""
        turn = "(SELECT coalesce(max(turn), 0) + 1 FROM gone)"
        row = f"SELECT key, codec, {turn} FROM files WHERE {_THIS} AND NOT is_main"
        connection.execute(f"INSERT OR REPLACE INTO gone {row}", (entry.key, entry.codec))
        connection.execute(
            "DELETE FROM gone WHERE turn <= (SELECT turn FROM gone ORDER BY turn DESC"
            " LIMIT 1 OFFSET (SELECT count(*) FROM files))"
        )

    def pin(self, connection: Connection, keys: Iterable[str], *, pinned: bool) -> None:
        """Have entries stay whatever comes, in all codecs, or leave as others do."""
        rows = [(pinned, key) for key in keys]
        connection.executemany("UPDATE files SET pinned = ? WHERE key = ?", rows)

    def touch(self, key: str, codec: str) -> None:
        """Count a use."""
        with self._lock:
            self._used[key, codec] += 1
            self._uses += 1
            is_due = self._uses % _USES_KEPT == 0
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write down uses; if another process is in the way, they wait for the next time."""
        with self._lock:
            used, self._used = self._used, Counter()
        if not used:
            return
        try:
            with self.database.transaction(BRIEFLY_S) as connection:
                sql = f"UPDATE files SET uses = min({MOST_USES}, uses + ?) WHERE {_THIS}"
                connection.executemany(sql, [(count, *this) for this, count in used.items()])
        except StoreError as error:
            _log.info("uses of KV are written down later: %s", error)
            with self._lock:
                self._used.update(used)
