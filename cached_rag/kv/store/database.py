"""A SQLite file shared by threads and processes. Knows connections; knows no table."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cached_rag.errors import ClosedError, StoreError, StoreFullError

_PATIENCE_S = 60


class Database:
    """One connection behind a lock: WAL mode, waits for other processes, commits or rolls back."""

    def __init__(self, path: Path, schema: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._is_closed = path, False
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(path, timeout=_PATIENCE_S, check_same_thread=False)
            self._enter_wal()
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(schema)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{path} is not a usable index ({error}); delete it and ingest again, or choose "
                "another folder"
            ) from error

    def _enter_wal(self) -> None:
        """Switch to WAL, which SQLite does not wait for where another process does the same."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Reads and writes that happen together or not at all.

        Raises:
            StoreFullError: the disk is full.
            ClosedError: as all methods, after `close`.
        """
        with self._opened() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                with connection:
                    yield connection
            except sqlite3.OperationalError as error:
                if "full" in str(error):
                    raise StoreFullError(
                        f"no room for the index: {error}; free some space"
                    ) from error
                raise

    def rows(self, query: str, *parameters: object) -> list[tuple[object, ...]]:
        """All rows of one query."""
        with self._opened() as connection:
            return connection.execute(query, parameters).fetchall()

    def version(self) -> int:
        """A number that changes when another connection has written."""
        with self._opened() as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            return int(version)

    def close(self) -> None:
        """Close the connection; doing it again changes nothing."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._is_closed:
                raise ClosedError(
                    f"{self._path} was closed; open the index, or load the engine, that uses it "
                    "again, and close it only when nothing will be asked any more"
                )
            yield self._connection
