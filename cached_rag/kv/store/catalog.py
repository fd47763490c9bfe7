"""Remembers which texts are modules, so that prompts can be searched for them after a restart.

It also remembers what modules stand behind; so, from a text's tokens, it can name every key that
the text's KV may have. That is how texts are removed (`Removals`). Knows SQLite; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from cached_rag.kv.fingerprint import ids_digest, module_key
from cached_rag.kv.store.database import (
    PATIENCE_S,
    Database,
    Problem,
    check,
    is_sound,
    row_sum,
    sound,
)
from cached_rag.kv.store.removals import Removals
from cached_rag.kv.store.tables import DOOMED, DROP_NEEDLESS, SCHEMA, SIGNED, pack, unpack

_MODULES = f"SELECT {SIGNED['modules']}, checksum FROM modules WHERE model = ? AND namespace = ?"
_PREFIXES = f"SELECT {SIGNED['encodings']}, checksum FROM encodings"


@dataclass(frozen=True)
class ChunkRecord:
    """A text that is a module.

    Attributes:
        text_digest: digest of the text.
        anchor: the text's first 32 characters.
        length: the text's length in characters.
        token_ids: the text's tokens, when it is tokenised alone.
        token_starts: for each token, the character of the text at which it begins.
    """

    text_digest: str
    anchor: str
    length: int
    token_ids: tuple[int, ...]
    token_starts: tuple[int, ...]


@dataclass(frozen=True)
class Maker:
    """A model that made KV, in one dtype.

    Attributes:
        model: its fingerprint.
        name, dtype: for people; empty where only the fingerprint is known.
    """

    model: str
    name: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.dtype}" if self.name else "another model or dtype"


class Catalog:
    """The modules and prefixes of one model and tenant, in a file that all of them share.

    Attributes:
        removals: removes texts of the tenant.
    """

    def __init__(self, path: Path | str, maker: Maker | str, namespace: str = "") -> None:
        """Open the file.

        Args:
            maker: the model, or its fingerprint alone. One that has a name is written down as the
                latest to use the file.
            namespace: the tenant.
        """
        self.maker = Maker(maker) if isinstance(maker, str) else maker
        self.namespace = namespace
        self._scope = (self.maker.model, namespace)
        self._database = Database(Path(path), SCHEMA)
        self.removals = Removals(self._database, namespace, self._behinds, self.damage)
        if self.maker.name and not self._database.is_read_only:
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
                astuple(self.maker),
            )

    def check(self) -> list[Problem]:
        """What is damaged: the file, or rows of any model and tenant."""
        queries = {t: f"SELECT {columns}, checksum FROM {t}" for t, columns in SIGNED.items()}
        return check(self._database, queries)

    def damage(self, model: str | None = None) -> str:
        """Why not all keys can be named that KV of a model and this tenant has; empty if they can.

        Args:
            model: its fingerprint; None for this one's.
        """
        rows = self._prefix_rows(self.maker.model if model is None else model)
        damaged = next((row for row in rows if not is_sound(row)), None)
        if damaged is None:
            return ""
        path = self._database.path
        return (
            f"row {damaged[0]} of encodings in {path} is damaged, so KV of texts that stand behind "
            "it cannot be found; ingest the documents again, which mends it, and do this again. If "
            f"that does not help, delete {path.parent} and ingest"
        )

    def makers(self) -> list[Maker]:
        """All models whose KV may be in the store, in the order in which they came to use it."""
        return self._database.read(Maker, "SELECT model, name, dtype FROM makers ORDER BY id")

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
        """The tenants that have modules, prefixes or schemas of this model."""
        tables = ("modules", "encodings", "others")
        query = " UNION ".join(f"SELECT namespace FROM {table} WHERE model = ?" for table in tables)
        return self._database.read(str, query, *[self.maker.model] * len(tables))

    def clear(self) -> None:
        """Forget this model, for all tenants, but for KV of it that still has to go."""
        model = self.maker.model
        with self._database.transaction() as connection:
            for table in ("modules", "others", "learned", "makers"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (model,))
            # Nobody will use the model again, and so mend these; see `damage`.
            rows = self._database.rows(f"{_PREFIXES} WHERE model = ?", model)
            damaged = [(row[0],) for row in rows if not is_sound(row)]
            connection.executemany("DELETE FROM encodings WHERE rowid = ?", damaged)
            connection.execute(DROP_NEEDLESS)
            connection.execute("UPDATE removals SET count = count + 1")

    def add_chunks(
        self,
        records: Iterable[ChunkRecord],
        patience_s: float = PATIENCE_S,
        *,
        learned: bool = False,
    ) -> None:
        """Remember texts as modules; known ones change nothing, removed ones come back.

        Args:
            patience_s: how long to wait for another process that is writing.
            learned: nobody gave them; they are marked so unless they are modules already. Else
                they lose that mark.
        """
        found = [
            (
                record.text_digest,
                record.anchor,
                record.length,
                pack(record.token_ids),
                pack(record.token_starts),
            )
            for record in records
        ]
        if not found:
            return
        rows = [(*self._scope, *values, row_sum(*values)) for values in found]
        sql = _put("modules", "text_digest", "anchor, length, token_ids, token_starts, checksum")
        where = "WHERE model = ? AND namespace = ? AND text_digest = ?"
        names = [row[:3] for row in rows]
        mark = (
            "INSERT OR IGNORE INTO learned SELECT ?1, ?2, ?3 WHERE NOT EXISTS"
            " (SELECT 1 FROM modules WHERE model = ?1 AND namespace = ?2 AND text_digest = ?3)"
        )
        with self._database.transaction(patience_s) as connection:
            connection.executemany(mark if learned else f"DELETE FROM learned {where}", names)
            connection.executemany(sql, rows)
            for table in DOOMED:
                if connection.executemany(f"DELETE FROM {table} {where}", names).rowcount:
                    connection.execute("UPDATE revivals SET count = count + 1")

    def learned(self) -> list[str]:
        """The tenant's texts that were marked so, for any model; the oldest first."""
        query = "SELECT text_digest FROM learned WHERE namespace = ? ORDER BY rowid"
        return self._database.read(str, query, self.namespace)

    def find(self, text_digests: Iterable[str]) -> list[ChunkRecord]:
        """Those of these texts that are modules."""
        query = f"{_MODULES} AND text_digest = ?"
        rows = (self._database.rows(query, *self._scope, name) for name in text_digests)
        return [_record(row) for found in rows for row in sound(self._database, found)]

    def modules(self, after: int = 0) -> Iterator[tuple[int, ChunkRecord]]:
        """(row number, record) of all modules that were added after a row, in order."""
        query = f"{_MODULES} AND id > ? ORDER BY id"
        for row in sound(self._database, self._database.rows(query, *self._scope, after)):
            yield int(str(row[0])), _record(row)

    def text_digests(self) -> set[str]:
        """Digests of all texts that are modules."""
        query = "SELECT text_digest FROM modules WHERE model = ? AND namespace = ?"
        return set(self._database.read(str, query, *self._scope))

    def keys(self) -> Iterator[str]:
        """All keys that KV of this model and tenant may have; see `damage`, too."""
        model = self.maker.model
        behinds = self._behinds(model)
        for _, module in self.modules():
            yield from (self._key(model, module.token_ids, *behind) for behind in behinds)
        yield from (self._key(model, ids, (), "") for ids, _ in behinds)
        query = "SELECT token_ids, context FROM others WHERE model = ? AND namespace = ?"
        for ids, context in self._database.rows(query, *self._scope):
            yield self._key(model, unpack(ids), (), str(context))

    def counts(self, held: Container[str]) -> dict[str, int]:
        """By the digest of its text, how many of a module's keys are among those held."""
        model = self.maker.model
        behinds = self._behinds(model)
        return {
            module.text_digest: sum(
                self._key(model, module.token_ids, *behind) in held for behind in behinds
            )
            for _, module in self.modules()
        }

    def _key(self, model: str, ids: Sequence[int], prefix: Sequence[int], context: str) -> str:
        return module_key(model, prefix, ids, self.namespace, context)

    def _behinds(self, model: str) -> set[tuple[tuple[int, ...], str]]:
        return {((), ""), *self._prefixes(model)}

    def add_prefix(self, token_ids: Sequence[int], context: str = "") -> None:
        """Remember that modules are encoded behind a prefix, and behind a context of that name."""
        values = (pack(token_ids), context)
        row = (*self._scope, ids_digest(token_ids), context, values[0], row_sum(*values))
        sql = _put("encodings", "digest, context", "token_ids, checksum")
        with self._database.transaction() as connection:
            connection.execute(sql, row)

    def add_other(self, token_ids: Sequence[int], context: str) -> None:
        """Remember that there is KV of tokens that no prompt is searched for: a schema's."""
        row = (*self._scope, ids_digest(token_ids), pack(token_ids), context)
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO others VALUES (?, ?, ?, ?, ?)", row)

    def prefixes(self) -> list[tuple[tuple[int, ...], str]]:
        """All prefixes that modules are encoded behind, each with the name of its context."""
        return self._prefixes(self.maker.model)

    def _prefixes(self, model: str) -> list[tuple[tuple[int, ...], str]]:
        rows = sound(self._database, self._prefix_rows(model))
        return [(unpack(ids), str(context)) for _, ids, context, _ in rows]

    def _prefix_rows(self, model: str) -> list[tuple[object, ...]]:
        query = f"{_PREFIXES} WHERE model = ? AND namespace = ?"
        return self._database.rows(query, model, self.namespace)

    def generation(self) -> int:
        """A number that grows with each removal."""
        (count,) = self._database.read(int, "SELECT count FROM removals")
        return count

    def changed(self) -> bool:
        """Whether another connection has written since the last call."""
        before, self._version = self._version, self._database.version()
        return before != self._version

    def was_not_read(self) -> None:
        """What has changed could not be read, so `changed` is to say so again."""
        self._version = -1


def _put(table: str, key: str, columns: str) -> str:
    """SQL that adds a row of one model and tenant, or mends the row of that key if it differs."""
    names = f"model, namespace, {key}, {columns}"
    marks = ", ".join("?" * len(names.split(",")))
    new = ", ".join(f"excluded.{name.strip()}" for name in columns.split(","))
    return (
        f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT (model, namespace, {key})"
        f" DO UPDATE SET ({columns}) = ({new}) WHERE ({columns}) IS NOT ({new})"
    )


def _record(row: tuple[object, ...]) -> ChunkRecord:
    _, text_digest, anchor, length, ids, starts, _ = row
    return ChunkRecord(str(text_digest), str(anchor), int(str(length)), unpack(ids), unpack(starts))
