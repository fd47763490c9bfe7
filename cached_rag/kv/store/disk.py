"""Modules as files, found through SQLite, bounded by bytes. Safe for several processes.

A file is the truth about its content and the index about its existence: a row without a file is a
miss, a file without a row is litter that `prune` removes. Knows no model.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cached_rag.errors import CorruptBlobError, StoreFullError
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store.base import Problem
from cached_rag.kv.store.blob import StoredKV, open_blob, read_blob, write_blob
from cached_rag.kv.store.codecs import Codec, codec_by_name
from cached_rag.kv.store.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (
    key TEXT NOT NULL, codec TEXT NOT NULL, nbytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    last_used REAL NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON blobs (last_used);
"""
_T = TypeVar("_T")
_Reader = Callable[[Path, str, "Sequence[int] | None", Codec, "str | None"], "_T | None"]
# Uses are written down in batches, so that a hit costs no transaction.
_USES_KEPT = 64


class DiskStore:
    """A `KVStore` in a folder. Checksums are verified at a module's first load in this process."""

    def __init__(self, path: Path | str, codec: str = "raw", max_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.codec = codec_by_name(codec)
        self.max_bytes = max_bytes
        self._database = Database(self.path / "index.sqlite", _SCHEMA)
        self._verified: set[str] = set()
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Write down recent uses and close the index."""
        self._flush()
        self._database.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, of every codec."""
        ((total,),) = self._database.rows("SELECT coalesce(sum(nbytes), 0) FROM blobs")
        return int(str(total))

    def __len__(self) -> int:
        return len(list(self.keys()))

    def __contains__(self, key: str) -> bool:
        return self._row(key) is not None and self._file(key).is_file()

    def keys(self) -> Iterator[str]:
        """All keys of this codec, least recently used first."""
        self._flush()
        query = "SELECT key FROM blobs WHERE codec = ? ORDER BY last_used"
        return iter([str(key) for (key,) in self._database.rows(query, self.codec.name)])

    def sizes(self) -> dict[str, int]:
        """Bytes of every file of this codec, by key."""
        query = "SELECT key, nbytes FROM blobs WHERE codec = ?"
        return {str(k): int(str(n)) for k, n in self._database.rows(query, self.codec.name)}

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module, mapped from its file, or None; see `KVStore.get`."""
        kv = self._found(key, token_ids, read_blob)
        if kv is not None:
            self._verified.add(key)
        return kv

    def open(self, key: str, token_ids: Sequence[int]) -> StoredKV | None:
        """The module, mapped and unread; its layers are checked as they are read."""
        return self._found(key, token_ids, open_blob)

    def _found(self, key: str, token_ids: Sequence[int], read: _Reader[_T]) -> _T | None:
        row = self._row(key)
        if row is None:
            return None
        expected = None if key in self._verified else row[1]
        try:
            found = read(self._file(key), key, token_ids, self.codec, expected)
        except CorruptBlobError:
            self.delete(key)
            raise
        if found is None:
            self._forget(key)
        else:
            self._touch(key)
        return found

    def put(self, key: str, kv: ModuleKV) -> None:
        """Keep a module; see `KVStore.put`."""
        if self.max_bytes is not None and kv.nbytes > 2 * self.max_bytes:
            raise self._too_large(kv.nbytes)  # no codec makes it fit
        info = write_blob(self._file(key), key, kv, self.codec)
        if self.max_bytes is not None and info.nbytes > self.max_bytes:
            self.delete(key)
            raise self._too_large(info.nbytes)
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?, ?)",
                (key, self.codec.name, info.nbytes, info.checksum, time.time()),
            )
        self._verified.add(key)
        if self.max_bytes is not None:
            self._evict(self.max_bytes)

    def _too_large(self, nbytes: int) -> StoreFullError:
        return StoreFullError(
            f"a module of {nbytes} bytes exceeds the store's bound of {self.max_bytes}; raise "
            "disk_bytes or use smaller chunks"
        )

    def delete(self, key: str) -> bool:
        """Forget an entry; says whether it was there."""
        known = self._forget(key)
        with contextlib.suppress(FileNotFoundError):
            self._file(key).unlink()
        return known

    def check(self) -> list[Problem]:
        """Read every file of this codec; report damage, missing files and litter."""
        problems = []
        rows = self._database.rows(
            "SELECT key, checksum FROM blobs WHERE codec = ?", self.codec.name
        )
        for key, expected in rows:
            path = self._file(str(key))
            try:
                if read_blob(path, str(key), None, self.codec, str(expected)) is None:
                    problems.append(Problem(str(key), f"the file {path} is missing"))
            except CorruptBlobError as error:
                problems.append(Problem(str(key), str(error)))
        return problems + [Problem(path.stem, f"litter: {path}") for path in self._litter()]

    def prune(self, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove litter, then the least recently used files until `max_bytes` are left.

        Returns:
            How many files went, and their bytes.
        """
        count = nbytes = 0
        for path in self._litter():
            with contextlib.suppress(FileNotFoundError):
                nbytes += path.stat().st_size
                path.unlink()
                count += 1
        if max_bytes is not None:
            evicted, freed = self._evict(max_bytes)
            count, nbytes = count + evicted, nbytes + freed
        return count, nbytes

    def _evict(self, max_bytes: int) -> tuple[int, int]:
        self._flush()
        excess = self.nbytes - max_bytes
        count = freed = 0
        if excess <= 0:
            return 0, 0
        query = "SELECT key, codec, nbytes FROM blobs ORDER BY last_used"
        for key, codec, nbytes in self._database.rows(query):
            if freed >= excess:
                break
            with self._database.transaction() as connection:
                sql = "DELETE FROM blobs WHERE key = ? AND codec = ?"
                connection.execute(sql, (key, codec))
            with contextlib.suppress(FileNotFoundError):
                self._file(str(key), str(codec)).unlink()
            count, freed = count + 1, freed + int(str(nbytes))
        return count, freed

    def _litter(self) -> list[Path]:
        """Files without a row, old enough not to be another process's write in progress."""
        rows = self._database.rows("SELECT key, codec FROM blobs")
        known = {self._file(str(key), str(codec)) for key, codec in rows}
        blobs = self.path / "blobs"
        found = sorted(path for path in blobs.glob("*/*") if path not in known)
        return [path for path in found if _age(path) > 60 or not path.name.endswith(".tmp")]

    def _file(self, key: str, codec: str | None = None) -> Path:
        return self.path / "blobs" / key[:2] / f"{key}.{codec or self.codec.name}.safetensors"

    def _row(self, key: str) -> tuple[int, str] | None:
        query = "SELECT nbytes, checksum FROM blobs WHERE key = ? AND codec = ?"
        rows = self._database.rows(query, key, self.codec.name)
        return (int(str(rows[0][0])), str(rows[0][1])) if rows else None

    def _forget(self, key: str) -> bool:
        self._verified.discard(key)
        with self._database.transaction() as connection:
            sql = "DELETE FROM blobs WHERE key = ? AND codec = ?"
            return connection.execute(sql, (key, self.codec.name)).rowcount > 0

    def _touch(self, key: str) -> None:
        with self._lock:
            self._used[key] = time.time()
            is_due = len(self._used) >= _USES_KEPT
        if is_due:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if not used:
            return
        rows = [(when, key, self.codec.name) for key, when in used.items()]
        with self._database.transaction() as connection:
            sql = "UPDATE blobs SET last_used = ? WHERE key = ? AND codec = ?"
            connection.executemany(sql, rows)


def _age(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
