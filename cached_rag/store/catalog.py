"""Remembers which texts are modules, so that prompts can be searched for them after a restart.

Rows belong to one model and one tenant. Knows SQLite; knows no KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cached_rag.fingerprint import ids_digest
from cached_rag.store.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS modules (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, namespace TEXT NOT NULL,
    text_digest TEXT NOT NULL, anchor TEXT NOT NULL, length INTEGER NOT NULL,
    token_ids BLOB NOT NULL, token_starts BLOB NOT NULL, UNIQUE (model, namespace, text_digest)
);
CREATE TABLE IF NOT EXISTS encodings (
    model TEXT NOT NULL, namespace TEXT NOT NULL, digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    context TEXT NOT NULL, PRIMARY KEY (model, namespace, digest, context)
);
CREATE TABLE IF NOT EXISTS removals (count INTEGER NOT NULL);
INSERT INTO removals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM removals);
"""
_MODULES = (
    "SELECT id, text_digest, anchor, length, token_ids, token_starts FROM modules"
    " WHERE model = ? AND namespace = ?"
)


@dataclass(frozen=True)
class ModuleRecord:
    """A text that is a module.

    Attributes:
        text_digest: digest of the text.
        anchor: its first 32 characters.
        length: in characters.
        token_ids: its tokens, tokenised by itself.
        token_starts: the character at which each token begins.
    """

    text_digest: str
    anchor: str
    length: int
    token_ids: tuple[int, ...]
    token_starts: tuple[int, ...]


@dataclass(frozen=True)
class Scope:
    """Whose rows: a model's, by fingerprint, and a tenant's."""

    model: str
    namespace: str


class Catalog:
    """Modules and prefixes of one model (by fingerprint) and tenant, in a shared file."""

    def __init__(self, path: Path | str, model: str, namespace: str = "") -> None:
        self._scope = (model, namespace)
        self._database = Database(Path(path), _SCHEMA)
        self._version = self._database.version()

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def add_modules(self, records: Iterable[ModuleRecord]) -> None:
        """Remember texts; those that are known change nothing."""
        rows = [
            (
                *self._scope,
                record.text_digest,
                record.anchor,
                record.length,
                _pack(record.token_ids),
                _pack(record.token_starts),
            )
            for record in records
        ]
        columns = "model, namespace, text_digest, anchor, length, token_ids, token_starts"
        sql = f"INSERT OR IGNORE INTO modules ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        with self._database.transaction() as connection:
            connection.executemany(sql, rows)

    def find(self, text_digests: Iterable[str]) -> list[ModuleRecord]:
        """The modules among texts, by digest."""
        query = f"{_MODULES} AND text_digest = ?"
        rows = (self._database.rows(query, *self._scope, name) for name in text_digests)
        return [_record(row) for found in rows for row in found]

    def modules(self, after: int = 0) -> Iterator[tuple[int, ModuleRecord]]:
        """(row, record) of all modules added after a row, in order."""
        query = f"{_MODULES} AND id > ? ORDER BY id"
        for row in self._database.rows(query, *self._scope, after):
            yield int(str(row[0])), _record(row)

    def remove_modules(self, text_digests: Sequence[str]) -> None:
        """Forget texts."""
        rows = [(*self._scope, text_digest) for text_digest in text_digests]
        sql = "DELETE FROM modules WHERE model = ? AND namespace = ? AND text_digest = ?"
        with self._database.transaction() as connection:
            connection.executemany(sql, rows)
            connection.execute("UPDATE removals SET count = count + 1")

    def add_prefix(self, token_ids: Sequence[int], context: str = "") -> None:
        """Remember a prefix that modules stand behind, and what followed it, by name."""
        row = (*self._scope, ids_digest(token_ids), _pack(token_ids), context)
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO encodings VALUES (?, ?, ?, ?, ?)", row)

    def prefixes(self) -> list[tuple[tuple[int, ...], str]]:
        """All known prefixes, each with the name of its context."""
        query = "SELECT token_ids, context FROM encodings WHERE model = ? AND namespace = ?"
        rows = self._database.rows(query, *self._scope)
        return [(_unpack(ids), str(context)) for ids, context in rows]

    def generation(self) -> int:
        """A number that grows whenever something was removed."""
        ((count,),) = self._database.rows("SELECT count FROM removals")
        return int(str(count))

    def changed(self) -> bool:
        """Whether another connection has written since the last call."""
        before, self._version = self._version, self._database.version()
        return before != self._version


def scopes(path: Path) -> list[Scope]:
    """All that have something in a catalog's file."""
    with closing(Database(path, _SCHEMA)) as database:
        rows = database.rows(
            "SELECT model, namespace FROM modules UNION SELECT model, namespace FROM encodings"
        )
    return [Scope(str(model), str(namespace)) for model, namespace in rows]


def _record(row: tuple[object, ...]) -> ModuleRecord:
    _, text_digest, anchor, length, ids, starts = row
    return ModuleRecord(
        str(text_digest), str(anchor), int(str(length)), _unpack(ids), _unpack(starts)
    )


def _pack(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


def _unpack(data: object) -> tuple[int, ...]:
    numbers = array("i")
    numbers.frombytes(bytes(data))  # type: ignore[call-overload]
    return tuple(numbers)
