"""Remembers which texts are modules, so that prompts can be searched for them after a restart.

Rows belong to one model and one tenant. Knows SQLite; knows no KV.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cached_rag.kv.fingerprint import ids_digest
from cached_rag.kv.store.database import Database

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
CREATE TABLE IF NOT EXISTS makers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    dtype TEXT NOT NULL
);
INSERT INTO makers (model, name, dtype) SELECT DISTINCT model, '', '' FROM modules
    WHERE NOT EXISTS (SELECT 1 FROM makers);
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
class Maker:
    """A model that KV is made by: its fingerprint; its name and dtype, for people.

    Both are empty where a version of this library made it that did not keep them.
    """

    model: str
    name: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.dtype}" if self.name else "another model or dtype"


class Catalog:
    """Modules and prefixes of one model (by fingerprint) and tenant, in a shared file."""

    def __init__(self, path: Path | str, maker: Maker | str, namespace: str = "") -> None:
        """Open the file; a maker that is known by name is written down as the latest to use it."""
        self.maker = Maker(maker) if isinstance(maker, str) else maker
        self.namespace = namespace
        self._scope = (self.maker.model, namespace)
        self._database = Database(Path(path), _SCHEMA)
        if self.maker.name:
            self._sign()
        self._version = self._database.version()

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def _sign(self) -> None:
        mine = (self.maker.name, self.maker.dtype)
        alike = [maker for maker in self.makers() if (maker.name, maker.dtype) == mine]
        if alike[-1:] == [self.maker]:
            return
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO makers (model, name, dtype) VALUES (?, ?, ?)",
                dataclasses.astuple(self.maker),
            )

    def makers(self) -> list[Maker]:
        """Whose KV there may be, the latest last."""
        rows = self._database.rows("SELECT model, name, dtype FROM makers ORDER BY id")
        return [Maker(str(model), str(name), str(dtype)) for model, name, dtype in rows]

    def makers_of(self, text_digests: Iterable[str]) -> list[Maker]:
        """Other models that know some of these texts."""
        query = f"{_MODULES} AND text_digest = ?"
        digests = list(text_digests)
        return [
            maker
            for maker in self.makers()
            if maker.model != self.maker.model
            and any(
                self._database.rows(query, maker.model, self.namespace, name) for name in digests
            )
        ]

    def namespaces(self) -> list[str]:
        """The tenants that have anything of this model."""
        rows = self._database.rows(
            "SELECT namespace FROM modules WHERE model = ?"
            " UNION SELECT namespace FROM encodings WHERE model = ?",
            self.maker.model,
            self.maker.model,
        )
        return [str(namespace) for (namespace,) in rows]

    def clear(self) -> None:
        """Forget this model, for all tenants."""
        with self._database.transaction() as connection:
            for table in ("modules", "encodings", "makers"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (self.maker.model,))
            connection.execute("UPDATE removals SET count = count + 1")

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
