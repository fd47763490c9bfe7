"""Which KV a store has, and which leaves where room is short: S3-FIFO, as queues in a table.

New entries enter a small queue, a tenth of the room. One that is used there, if only once, moves to
the main queue; one that is not leaves, and its key is remembered for a while: if it comes back, it
enters the main queue. There an entry goes round once for each use, up to three, before it leaves.
So texts that are ingested and never asked for do not push out those that are asked for every day,
and what was popular last year leaves all the same (docs/scale.md has hit rates). An entry's cost to
compute again grows with its bytes, in one model, so that neither decides.

What is pinned is in no queue. What has a time to live goes when it is over, whatever its queue.

From S3-FIFO (Yang et al., SOSP 2023, https://doi.org/10.1145/3600006.3613147), section 4. Of what
is in memory the table is in memory, too. Knows SQLite; knows no KV and no file of it.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from cached_rag.errors import ClosedError, ConfigError, StoreError, StoreFullError
from cached_rag.kv.database import BRIEFLY_S, Database

_log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, codec TEXT NOT NULL, name TEXT NOT NULL, nbytes INTEGER NOT NULL,
    checksum TEXT NOT NULL, is_main INTEGER NOT NULL, turn INTEGER NOT NULL, uses INTEGER NOT NULL,
    pinned INTEGER NOT NULL, until REAL NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_turn ON files (turn);
CREATE INDEX IF NOT EXISTS by_queue ON files (pinned, is_main, turn, nbytes);
CREATE INDEX IF NOT EXISTS by_end ON files (until);
CREATE TABLE IF NOT EXISTS gone (
    key TEXT NOT NULL, codec TEXT NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_leaving ON gone (turn);
CREATE TABLE IF NOT EXISTS totals (
    pinned INTEGER NOT NULL, is_main INTEGER NOT NULL, count INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, PRIMARY KEY (pinned, is_main)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON files BEGIN
    INSERT INTO totals VALUES (new.pinned, new.is_main, 1, new.nbytes)
    ON CONFLICT (pinned, is_main) DO UPDATE
    SET count = count + 1, nbytes = nbytes + excluded.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON files BEGIN
    UPDATE totals SET count = count - 1, nbytes = nbytes - old.nbytes
    WHERE pinned = old.pinned AND is_main = old.is_main;
END;
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF pinned, is_main ON files BEGIN
    UPDATE totals SET count = count - 1, nbytes = nbytes - old.nbytes
    WHERE pinned = old.pinned AND is_main = old.is_main;
    INSERT INTO totals VALUES (new.pinned, new.is_main, 1, new.nbytes)
    ON CONFLICT (pinned, is_main) DO UPDATE
    SET count = count + 1, nbytes = nbytes + excluded.nbytes;
END;
"""
_COUNTED = "SELECT pinned, is_main, count(*), sum(nbytes) FROM files GROUP BY 1, 2"
_ENTRY = "key, codec, name, nbytes, checksum"
# The small queue's share of the room, and the most uses that count.
_SMALL_SHARE, _MOST_USES = 0.1, 3
# What pins may take of the room: the rest is for everybody.
PINNED_SHARE = 0.5
# Turns are counted, not timed: clocks go back.
_NOW = "(SELECT coalesce(max(turn), 0) + 1 FROM files)"
_THIS = "key = ? AND codec = ?"
# Uses are written down in batches, so that not every hit costs a transaction.
_USES_KEPT = 512


def until_when(ttl_seconds: float | None) -> float | None:
    """When so many seconds will be over, in seconds since 1970.

    Raises:
        ConfigError: the time is not positive.
    """
    if ttl_seconds is not None and not ttl_seconds > 0:
        raise ConfigError(f"a time to live is more than 0 seconds, not {ttl_seconds}")
    return None if ttl_seconds is None else time.time() + ttl_seconds


def check_reach(until: float | None, *, is_shared: bool) -> None:
    """Refuse a time for KV that a remote store has, too.

    Raises:
        ConfigError: there is a remote store, and a time.
    """
    if until is not None and is_shared:
        raise ConfigError(
            "a time to live does not reach the remote store, from which KV would come again; "
            "forget the texts when it is over"
        )


@dataclass(frozen=True)
class Entry:
    """A file of the store, or a module in memory.

    Attributes:
        key: the module's.
        name: drawn at random, so that it differs from any file that this one replaced; of a file
            that is signed `signer_name` follows.
        nbytes: the file's size, or the module's.
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


class Listed:
    """A store's table of entries, and what all kinds of stores do by it alone; see `KVStore`.

    `_add`, `_evict`, `_take_out` and `_take_out_these` return the entries that they took out of the
    table. They belong in a transaction, in which the KV of these entries goes, too.
    """

    def __init__(self, path: Path, codec: str, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._codec_name = codec
        self._database = Database(path, _SCHEMA)
        self._used = Counter[str]()
        self._uses = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Write down which entries were used lately, and close the table."""
        self._flush()
        self._database.close()

    @property
    def nbytes(self) -> int:
        """Bytes held now, in every codec."""
        return self._total("totals")

    def _total(self, table: str, where: str = "1", *parameters: object) -> int:
        """Bytes of some entries, or of some queues."""
        query = f"SELECT coalesce(sum(nbytes), 0) FROM {table} WHERE {where}"
        (total,) = self._database.read(int, query, *parameters)
        return total

    def _recount(self) -> None:
        """Mend totals that are damaged; in a transaction."""
        self._database.rows("DELETE FROM totals")
        self._database.rows(f"INSERT INTO totals {_COUNTED}")

    def _is_miscounted(self) -> bool:
        """Whether totals are damaged; to be asked while nobody writes."""
        queries = ("SELECT * FROM totals WHERE count OR nbytes", _COUNTED)
        kept, counted = (self._database.rows(f"{query} ORDER BY 1, 2") for query in queries)
        return kept != counted

    def sizes(self) -> dict[str, int]:
        """By key, the bytes of its entries in all codecs that are not over."""
        query = "SELECT key, sum(nbytes) FROM files WHERE until > ? GROUP BY key"
        made = self._database.read(lambda key, size: (str(key), int(size)), query, time.time())
        return dict(made)

    def _all(self) -> list[Entry]:
        """All entries, of all codecs, those that are over as well."""
        return self._database.read(Entry, f"SELECT {_ENTRY} FROM files")

    def _entry(self, key: str, codec: str | None = None) -> Entry | None:
        """A key's entry in a codec (None: the store's), or None."""
        query = f"SELECT {_ENTRY} FROM files WHERE {_THIS} AND until > ?"
        found = self._database.read(Entry, query, key, codec or self._codec_name, time.time())
        return found[0] if found else None

    def ends(self, key: str) -> float:
        """See `KVStore.ends`."""
        sql = f"SELECT until FROM files WHERE {_THIS}"
        return next(iter(self._database.read(float, sql, key, self._codec_name)), math.inf)

    def hold(self, keys: Iterable[str], *, pinned: bool | None, until: float | None) -> int:
        """See `KVStore.hold`; of all codecs."""
        this, now = "key = ? AND until > ?", time.time()
        sql = "UPDATE files SET pinned = coalesce(?, pinned), until = coalesce(?, until)"
        with self._database.transaction():
            rows, live = self._database.rows, f"SELECT 1 FROM files WHERE {this}"
            held = [key for key in dict.fromkeys(keys) if rows(live, key, now)]
            for key in held:
                rows(f"{sql} WHERE {this}", pinned, until, key, now)
            pins = self._total("files", "pinned = 1 AND until > ?", now)
            if pinned and self.max_bytes is not None and pins > PINNED_SHARE * self.max_bytes:
                raise StoreFullError(
                    f"pinned KV may take {PINNED_SHARE * self.max_bytes:.0f} of the store's "
                    f"{self.max_bytes} bytes, and would take {pins}; unpin some, or raise the "
                    "store's bound"
                )
        return len(held)

    def delete(self, key: str) -> bool:
        """Delete a key's entries, and forget that there were any; says whether there were."""
        with self._database.transaction():
            self._database.rows("DELETE FROM gone WHERE key = ?", key)
            gone = self._take_out("key = ?", key)
            self._discard_all(key)
        return bool(gone)

    def _discard_all(self, key: str) -> None:
        """Delete all KV of a key, of which there are no entries any more."""
        raise NotImplementedError

    def _check_size(self, nbytes: int, setting: str) -> None:
        """Refuse a module that would not fit if there were no other.

        Args:
            setting: where the bound is set.
        """
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise StoreFullError(
                f"a module of {nbytes} bytes exceeds the store's bound of {self.max_bytes}; raise "
                f"{setting} or use smaller chunks"
            )

    def _add(self, entry: Entry, until: float | None = None) -> list[Entry]:
        """Add an entry, as the last of its queue; returns those that it replaces or pushes out.

        Args:
            until: see `Terms`.

        Raises:
            StoreFullError: it is larger than what pins leave.
        """
        this, rows = (entry.key, entry.codec), self._database.rows
        gone = self._take_out("until <= ?", time.time())
        before = rows(f"SELECT is_main, uses, pinned, until FROM files WHERE {_THIS}", *this)
        is_back = bool(rows(f"SELECT 1 FROM gone WHERE {_THIS}", *this))
        rows(f"DELETE FROM gone WHERE {_THIS}", *this)
        is_main, uses, pinned, end = before[0] if before else (is_back, 0, 0, math.inf)
        gone += self._take_out(_THIS, *this)
        if (bound := self.max_bytes) is not None:
            # Of pins, what a process with a larger bound, or none, has beyond this one's share.
            for pins in (True, False):
                gone += self._evict(bound, entry.nbytes, pinned=pins)
            if (held := self.nbytes) + entry.nbytes > bound:
                raise StoreFullError(
                    f"a module of {entry.nbytes} bytes does not fit into the {bound - held} "
                    "that pinned KV leaves; unpin some, or raise the store's bound"
                )
        sql = f"INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, {_NOW}, ?, ?, ?)"
        kept = (is_main, uses, pinned, end if until is None else until)
        rows(sql, *astuple(entry), *kept)
        return gone

    def _take_out(self, where: str, *parameters: object) -> list[Entry]:
        # Not by RETURNING, which SQLite has from 3.35 on: RHEL 9 and Debian 11 have 3.34.
        found = self._database.read(Entry, f"SELECT {_ENTRY} FROM files WHERE {where}", *parameters)
        self._database.rows(f"DELETE FROM files WHERE {where}", *parameters)
        return found

    def _take_out_these(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take out these, but none that has replaced them; returns those that were there."""
        gone: list[Entry] = []
        for one in entries:
            gone += self._take_out(f"{_THIS} AND name = ?", one.key, one.codec, one.name)
        return gone

    def _evict(self, max_bytes: int, room: int = 0, *, pinned: bool = False) -> list[Entry]:
        """Take out entries until `max_bytes` are left, less some room, or none.

        Args:
            pinned: take out those that are pinned, of all others; for room no more than are beyond
                their share.
        """
        excess, gone = self.nbytes + room - max_bytes, list[Entry]()
        queue = f"pinned = {int(pinned)} AND is_main = ?"
        small, main = (self._total("totals", queue, is_main) for is_main in (0, 1))
        least = PINNED_SHARE * max_bytes if pinned and room else 0
        first = f"SELECT {_ENTRY} FROM files WHERE {queue} ORDER BY turn LIMIT 1"
        while excess > 0 and small + main > least:
            is_small = not main or small >= max(1, _SMALL_SHARE * max_bytes)
            found = self._database.read(Entry, first, not is_small)
            if not found:  # the totals are damaged, of whatever there is to take out
                self._recount()
                return gone + self._evict(max_bytes, room, pinned=pinned)
            (entry,) = found
            goes_on = not pinned and self._goes_on(entry)
            small -= entry.nbytes if is_small else 0
            main += entry.nbytes * (goes_on - (not is_small))
            if not goes_on:
                gone += self._take_out(_THIS, entry.key, entry.codec)
                excess -= entry.nbytes
        return gone

    def _goes_on(self, entry: Entry) -> bool:
        """Whether an entry whose turn it is was used, and so gets another one in the main queue."""
        this, rows = (entry.key, entry.codec), self._database.rows
        if rows(f"SELECT 1 FROM files WHERE {_THIS} AND uses", *this):
            turned = f"uses = (uses - 1) * is_main, is_main = 1, turn = {_NOW}"
            rows(f"UPDATE files SET {turned} WHERE {_THIS}", *this)
            return True
        # Of what leaves the small queue the last ones are noted, as many as there are files.
        turn = "(SELECT coalesce(max(turn), 0) + 1 FROM gone)"
        row = f"SELECT key, codec, {turn} FROM files WHERE {_THIS} AND NOT is_main"
        rows(f"INSERT OR REPLACE INTO gone {row}", *this)
        rows(
            "DELETE FROM gone WHERE turn <= (SELECT turn FROM gone ORDER BY turn DESC"
            " LIMIT 1 OFFSET (SELECT sum(count) FROM totals WHERE pinned = 0))"
        )
        return False

    def touch(self, key: str) -> None:
        """See `KVStore.touch`."""
        with self._lock:
            self._used[key] += 1
            self._uses += 1
            is_due = self._uses % _USES_KEPT == 0
        if is_due:
            self._flush()

    def _flush(self) -> None:
        """Write down uses; if another process is in the way, they wait for the next time."""
        with self._lock:
            used, self._used = self._used, Counter()
        if not used:
            return
        try:
            with self._database.transaction(BRIEFLY_S) as connection:
                sql = f"UPDATE files SET uses = min({_MOST_USES}, uses + ?) WHERE {_THIS}"
                rows = [(count, key, self._codec_name) for key, count in used.items()]
                connection.executemany(sql, rows)
        except (StoreError, ClosedError) as error:  # a query may end while its store is closed
            _log.info("uses of KV are written down later: %s", error)
            with self._lock:
                self._used.update(used)
