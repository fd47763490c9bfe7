"""A SQLite file shared by threads and processes, and rows in it that carry a checksum.

A signed row is a tuple (name, *values, checksum), where the name is the row's number and the
checksum covers the values. So a damaged text is never taken for the real one. Knows connections;
knows no table.
"""

import logging
import os
import shutil
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote
from weakref import WeakSet

from cached_rag.errors import ClosedError, ConfigError, StoreError, StoreFullError
from cached_rag.kv.files import make_folder, status_of
from cached_rag.kv.fingerprint import digest

_log = logging.getLogger(__name__)
PATIENCE_S = 60.0
# For what a question writes beside its answer, and what can as well be written later.
BRIEFLY_S = 0.25
_POLL_S = 0.01
# How long a deletion may wait until nobody reads what was deleted.
_SCRUB_S = 10.0
# A quarter of a second; a thousand chunks take 8 MB.
_COMPACTED_BYTES = 64 << 20
# With less than that free, SQLite may have no room for the log and its index, and calls that an I/O
# error: each file that is opened takes 32 KB, and what is written to it.
_SQLITES_BYTES = 1 << 18
_T = TypeVar("_T")
Row = tuple[object, ...]

# Of the names of the files that SQLite may keep.
_SUFFIXES = ("", "-wal", "-shm", "-journal")
# Of the tables that this version reads and writes, and of files' names; a change to any of them
# takes the next number.
LAYOUT = 5
# No file: what it holds is gone with it.
IN_MEMORY = Path(":memory:")


@dataclass(frozen=True)
class Problem:
    """What `check` found: the name of an entry or file, and what is wrong with it in words."""

    key: str
    reason: str


class Database:
    """One connection to a file in WAL mode, for all threads; waits while other processes write.

    Every method raises StoreError if the file is damaged, cannot be read or written, or is in use
    for too long, and ClosedError after `close`.

    Attributes:
        path: the file, which only its owner may read.
        is_read_only: whether this user may not write the file or its folder.
    """

    def __init__(self, path: Path, schema: str) -> None:
        """Open or make a file.

        Args:
            schema: SQL that makes the tables; it is run at each opening.

        Raises:
            StoreError: also if another version of this library made the file.
        """
        if path != IN_MEMORY:
            path = Path(os.path.abspath(path))  # the process may change its folder
        self.path, self._is_closed = path, False
        self._lock = threading.RLock()
        try:
            make_folder(path.parent)
            is_writable = all(os.access(place, os.W_OK) for place in (path, path.parent))
            self.is_read_only = path.is_file() and not is_writable
        except OSError as error:
            raise self._forbidden(str(error)) from error
        self._reopened, self._is_forked = 0, False
        with self._explained():
            self._connect()
            try:
                prepare = self._check_layout if self.is_read_only else partial(self._set_up, schema)
                self._when_free(prepare, PATIENCE_S)
            except BaseException:
                self.close()
                raise
        self._status = status_of(path)
        _OPEN.add(self)

    def is_replaced(self) -> bool:
        """Whether another file has its path by now: somebody removed it, and it was made anew."""
        here, now = self._status, status_of(self.path)
        return here is not None and now is not None and not os.path.samestat(here, now)

    def _connect(self) -> None:
        for suffix in _SUFFIXES:
            _check_file(self.path.with_name(self.path.name + suffix))
        where, state = str(self.path), self._state()
        if self.is_read_only:
            # Whoever writes the file keeps a log beside it; without a log it does not change.
            where = f"file:{quote(where)}?{'mode=ro' if state[0] else 'immutable=1'}"
        # No timeout: `_when_free` waits for other processes, and lets go of the lock meanwhile.
        found = sqlite3.connect(where, timeout=0, check_same_thread=False, uri=self.is_read_only)
        # Text that is no UTF-8 is no error here: that it is damaged is for checksums to tell.
        weakref.finalize(self, found.close).atexit = False
        found.text_factory = lambda data: data.decode(errors="replace")
        self._connection, self._opened_at = found, state

    def _state(self) -> tuple[int, ...]:
        """Whether the file has a log; without one, also what changes when somebody writes it."""
        try:
            has_log = self.path.with_name(self.path.name + "-wal").exists()
            stat = self.path.stat()
        except OSError:  # which SQLite will say when it opens the file
            return (False,)
        return (True,) if has_log else (False, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def _is_outdated(self) -> bool:
        """Whether a reader's file has a log now, or none any more, or changed without one."""
        return self.is_read_only and self._state() != self._opened_at

    def _current(self) -> sqlite3.Connection:
        """The connection; the caller holds the lock."""
        if self._is_outdated():
            before = self._connection
            with self._explained():  # no use to wait for what may not be read
                self._connect()
            before.close()
            self._reopened += 1
        return self._connection

    def _set_up(self, schema: str) -> None:
        self._connection.execute("PRAGMA user_version")  # makes the file, if there is none
        for suffix in _SUFFIXES:
            _make_private(self.path.with_name(self.path.name + suffix))
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._tune()
        if not self._layout():
            self._connection.execute(f"PRAGMA user_version = {LAYOUT}")
        self._check_layout()
        self._connection.executescript(schema)

    def _tune(self) -> None:
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA secure_delete=ON")  # overwrites what is deleted

    def _forked(self) -> None:
        """Close the connection in a forked child, which opens another one when it asks.

        SQLite's locks stay with the parent: what the child wrote by its connection would be lost as
        soon as another process took the file for unused. One that a thread of the parent was just
        using stays open, for it cannot be closed.
        """
        if self.path != IN_MEMORY:
            if self._lock.acquire(blocking=False):
                self._connection.close()
            self._is_forked = True
        self._lock = threading.RLock()

    def _layout(self) -> int:
        """The layout of the tables that there are; 0 where there are none."""
        (has_tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (layout,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(layout) if layout or not has_tables else -1

    def _check_layout(self) -> None:
        if self._layout() not in (0, LAYOUT):
            raise StoreError(
                f"{self.path} was made by another version of this library; {self._remedy}"
            )

    @contextmanager
    def transaction(self, patience_s: float = PATIENCE_S) -> Iterator[sqlite3.Connection]:
        """Reads and writes that happen all together, or not at all.

        Args:
            patience_s: how long to wait for another process that is writing.

        Raises:
            StoreFullError: the disk is full.
            StoreError: also if the file may not be written.
        """
        if self.is_read_only:
            raise self._forbidden("it is read-only for this user")

        deadline = time.monotonic() + patience_s
        with self._explained():
            while True:
                with self._lock:
                    self._check_open()
                    with self._connection as connection:  # ends what an interrupt left begun
                        if self._succeeds(partial(connection.execute, "BEGIN IMMEDIATE"), deadline):
                            yield connection
                            return
                time.sleep(_POLL_S)

    def rows(self, query: str, *parameters: object) -> list[tuple[object, ...]]:
        """All rows of one query."""
        with self._explained():
            return self._when_free(
                lambda: self._current().execute(query, parameters).fetchall(), PATIENCE_S
            )

    def read(self, make: Callable[..., _T], query: str, *parameters: object) -> list[_T]:
        """`make(*columns)` for each row; if it raises, the file is damaged."""
        rows = self.rows(query, *parameters)
        try:
            return [make(*row) for row in rows]
        except (TypeError, ValueError, OverflowError) as error:
            raise self._unusable(error) from error

    def version(self) -> int:
        """A number that changes whenever another connection writes."""
        (version,) = self.read(int, "PRAGMA data_version")
        return version + (self._reopened << 32)

    @property
    def own_changes(self) -> int:
        """A number that grows with each row that this connection writes."""
        return self._when_free(lambda: self._connection.total_changes, PATIENCE_S)

    def sound(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Those signed rows that are as they were written; the others are logged."""
        for row in rows:
            if is_sound(row):
                yield row
            else:
                _log.warning("%s", self._damage(row))

    def check(self, tables: Mapping[str, str]) -> list[Problem]:
        """What is damaged: the file itself, by what SQLite finds in it, or rows of it.

        Args:
            tables: for each table with signed rows, by name, the query for all of these.
        """
        name, problems = self.path.name, list[Problem]()
        try:
            found = [text for text in self.read(str, "PRAGMA integrity_check") if text != "ok"]
            for table, row, *_ in self.rows("PRAGMA foreign_key_check"):
                found.append(f"row {row} of {table} belongs to nothing")
            problems = [Problem(name, reason) for reason in found]
            for table, query in tables.items():
                damaged = [row for row in self.rows(query) if not is_sound(row)]
                problems += [Problem(f"{name} {table}", self._damage(row)) for row in damaged]
        except StoreError as error:
            problems.append(Problem(name, str(error)))
        return problems

    def _damage(self, row: Row) -> str:
        return (
            f"row {row[0]} in {self.path} is damaged and left out; ingest the documents again to "
            "have it back, or run cached-rag store prune if it is a prompt's (cached-rag store "
            "verify lists all such rows)"
        )

    def scrub(self) -> None:
        """Leave nothing of deleted rows in the file, nor in its log, once nobody reads them.

        SQLite overwrites a row that is deleted (`secure_delete`), but not what it left where it lay
        before it was moved between pages. So the file is written anew, if that takes no longer
        than a deletion may; else `compact` is left to who prunes.
        """
        if (status := status_of(self.path)) is None:  # somebody removed it
            return
        if status.st_size <= _COMPACTED_BYTES:
            try:
                self.compact()
            except StoreError as error:  # no room, for one; what was deleted is deleted
                _log.warning("copies of what was deleted may stay for now: %s", error)
        self._empty_log()

    def compact(self) -> None:
        """Write the file anew, with nothing in it but the rows that there are."""
        self.rows("VACUUM")
        self._empty_log()

    def _empty_log(self) -> None:
        deadline = time.monotonic() + _SCRUB_S
        while self.rows("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]:  # 1 where it did not succeed
            if time.monotonic() > deadline:
                _log.warning("what was deleted stays in %s-wal while others read it", self.path)
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the connection; doing it again changes nothing."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    def _when_free(self, act: Callable[[], _T], patience_s: float) -> _T:
        """Call `act` under the lock, again and again while another process is in the way.

        Between two tries the lock is free.
        """
        deadline, found = time.monotonic() + patience_s, list[_T]()
        while True:
            with self._lock:
                self._check_open()
                if self._succeeds(lambda: found.append(act()), deadline):
                    return found[0]
            time.sleep(_POLL_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(
                f"{self.path} was closed; open the index, or load the engine, that uses "
                "it again, and close it only when nothing will be asked any more"
            )
        if self._is_forked:
            self._connect()
            self._tune()
            self._is_forked, self._reopened = False, self._reopened + 1

    def _succeeds(self, act: Callable[[], object], deadline: float) -> bool:
        """Call `act`; False if another process is in the way, and the deadline is not over."""
        try:
            act()
        except sqlite3.DatabaseError as error:
            may_pass = "locked" in str(error) or self._is_outdated()
            if not may_pass or time.monotonic() > deadline:
                raise
            return False
        return True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns SQLite's errors into errors that say where, why, and what to do."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"half of a surrogate pair stands alone in {error.object!r}, as in the name of a "
                "file that is no UTF-8; give whole characters"
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            why = str(error)
            if "full" in why or ("I/O" in why and _is_full(self.path.parent)):
                message = f"no room for {self.path} and the files beside it: {why}; free some space"
                raise StoreFullError(message) from error
            if "locked" in why:
                raise StoreError(
                    f"{self.path} is being written by another process ({why}); wait for it, or "
                    "end it if it hangs"
                ) from error
            if "unable to open" in why or "readonly" in why:
                raise self._forbidden(why) from error
            if "I/O" in why:
                message = f"{self.path} cannot be read or written ({why}); look after the disk"
                raise StoreError(message) from error
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(f"{self.path} is not a usable index ({error}); {self._remedy}")

    @property
    def _remedy(self) -> str:
        who = "its owner has to delete it" if self.is_read_only else "delete it"
        return f"{who} and ingest again, or choose another folder"

    def _forbidden(self, why: str) -> StoreError:
        return StoreError(
            f"{self.path} cannot be written ({why}); allow this user to write it and its folder "
            f"{self.path.parent}, or choose another folder"
        )


_OPEN: WeakSet[Database] = WeakSet()


def _after_fork() -> None:
    for database in list(_OPEN):
        database._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _check_file(path: Path) -> None:
    """Raise a StoreError if there is a pipe, a device or a folder: SQLite might wait for it."""
    with suppress(OSError):  # it is not there, or no more
        if stat.S_ISREG(path.stat().st_mode):
            return
        raise StoreError(f"{path} is no file; remove it, or choose another folder")


def _is_full(folder: Path) -> bool:
    with suppress(OSError):  # such as a folder that is no more
        return shutil.disk_usage(folder).free < _SQLITES_BYTES
    return False


def _make_private(path: Path) -> None:
    """Let nobody but its owner read a file; that of another user stays as it is."""
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)


def row_sum(*values: object) -> str:
    """The checksum of a row's values and their types: guards against damage, not malice."""
    parts = (v if isinstance(v, bytes) else f"{type(v).__name__} {v}" for v in values)
    return digest(*parts)


def is_sound(row: Row) -> bool:
    """Whether a signed row is as it was written."""
    return row_sum(*row[1:-1]) == row[-1]
