"""Remembers which texts are modules, so that prompts can be searched for them after a restart.

It also remembers what modules stand behind; so, from a text's tokens, it can name every key that
the text's KV may have. That is how texts are removed, with what has to go with them (`Removals`):
it survives a kill at any point, and other processes that write. Knows SQLite; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from cached_rag.errors import StoreError
from cached_rag.kv.database import PATIENCE_S, Database, Problem, Row, is_sound, row_sum
from cached_rag.kv.fingerprint import ids_digest, module_key
from cached_rag.kv.tables import DOOMED, DROP_NEEDLESS, SCHEMA, SIGNED, pack, unpack

_MODULES = f"SELECT {SIGNED['modules']}, checksum FROM modules WHERE model = ? AND namespace = ?"
_PREFIXES = f"SELECT {SIGNED['encodings']}, checksum FROM encodings"
# What a text was encoded behind: the tokens of a prefix, and the name of a context.
Behind = tuple[tuple[int, ...], str]
_ALONE: Behind = ((), "")
# Not if one came back and is doomed anew meanwhile: it may have new KV.
_DONE = "WHERE model = ? AND namespace = ? AND text_digest = ? AND (SELECT count FROM revivals) = ?"
# Deletes the KV of a key, and says whether there was any.
Delete = Callable[[str], bool]


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
        return f"{self.name} in {self.dtype}"


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
        self.removals = Removals(self, self._database)
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
        return self._database.check(queries)

    def damage(self, model: str | None = None) -> str:
        """Why not all keys can be named that KV of a model and this tenant has; empty if they can.

        Args:
            model: its fingerprint; None for this one's.
        """
        damaged = next((row for row in self._prefix_rows(model) if not is_sound(row)), None)
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
        return [_record(row) for found in rows for row in self._database.sound(found)]

    def modules(self, after: int = 0) -> Iterator[tuple[int, ChunkRecord]]:
        """(row number, record) of all modules that were added after a row, in order."""
        query = f"{_MODULES} AND id > ? ORDER BY id"
        for row in self._database.sound(self._database.rows(query, *self._scope, after)):
            yield int(str(row[0])), _record(row)

    def text_digests(self) -> set[str]:
        """Digests of all texts that are modules."""
        query = "SELECT text_digest FROM modules WHERE model = ? AND namespace = ?"
        return set(self._database.read(str, query, *self._scope))

    def keys(self) -> Iterator[str]:
        """All keys that KV of this model and tenant may have; see `damage`, too."""
        model = self.maker.model
        behinds = self.behinds(model)
        for _, module in self.modules():
            yield from self.keys_of(model, module.token_ids, behinds)
        for ids, _ in behinds:
            yield from self.keys_of(model, ids, [_ALONE])
        query = "SELECT token_ids, context FROM others WHERE model = ? AND namespace = ?"
        for packed, context in self._database.rows(query, *self._scope):
            yield from self.keys_of(model, unpack(packed), [((), str(context))])

    def counts(self, held: Container[str]) -> dict[str, int]:
        """By the digest of its text, how many of a module's keys are among those held."""
        model = self.maker.model
        behinds = self.behinds(model)
        return {
            module.text_digest: sum(
                key in held for key in self.keys_of(model, module.token_ids, behinds)
            )
            for _, module in self.modules()
        }

    def keys_of(self, model: str, ids: Sequence[int], behinds: Iterable[Behind]) -> list[str]:
        """The keys of a model's KV of these tokens, encoded behind each of these."""
        return [module_key(model, prefix, ids, self.namespace, name) for prefix, name in behinds]

    def behinds(self, model: str) -> set[Behind]:
        """All that texts of a model may have been encoded behind."""
        return {_ALONE, *self.prefixes(model)}

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

    def prefixes(self, model: str | None = None) -> list[Behind]:
        """All prefixes that modules of a model (None: of this one) are encoded behind."""
        rows = self._database.sound(self._prefix_rows(model))
        return [(unpack(ids), str(context)) for _, ids, context, _ in rows]

    def _prefix_rows(self, model: str | None) -> list[Row]:
        model = self.maker.model if model is None else model
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


class _Doomed(NamedTuple):
    """A text whose KV has to go, and how many such texts had come back when this was read."""

    model: str
    text_digest: str
    token_ids: tuple[int, ...]
    revivals: object


class Removals:
    """The texts of one tenant that have to go, by all models, from here and from a remote store."""

    def __init__(self, catalog: Catalog, database: Database) -> None:
        self._catalog, self._database, self._namespace = catalog, database, catalog.namespace

    def remove(self, delete: Delete, text_digests: Collection[str]) -> int:
        """Remove this tenant's texts, and their KV by all models; says how many KVs went.

        KV in a remote store goes by `finish_far`.

        The order survives a kill and loses no race. First the catalog says, in one transaction,
        that the texts are no modules any more and that their KV has to go; then the KV goes; then
        the catalog forgets that it had to. Whoever puts KV into the store looks into the catalog
        when this deletion is over or has yet to come, so KV that comes too late is not kept.

        Raises:
            StoreError: see `finish`.
        """
        self.doom(text_digests)
        return self.finish(delete, text_digests)

    def doom(self, text_digests: Iterable[str]) -> None:
        """Begin to remove texts: they are no modules from now on, and their KV has to go."""
        rows = [(self._namespace, text_digest) for text_digest in text_digests]
        where = "FROM modules WHERE namespace = ? AND text_digest = ?"
        columns = "model, namespace, text_digest, token_ids"
        with self._database.transaction() as connection:
            connection.executemany(f"INSERT OR IGNORE INTO doomed SELECT {columns} {where}", rows)
            connection.executemany(f"DELETE {where}", rows)
            connection.executemany(
                "DELETE FROM learned WHERE namespace = ? AND text_digest = ?", rows
            )
            connection.execute("UPDATE removals SET count = count + 1")

    def finish(self, delete: Delete, text_digests: Collection[str] | None = None) -> int:
        """Delete KV that has to go, of these texts or of all; says how many KVs went.

        Args:
            delete: deletes the KV of a key from this machine, and says whether there was any.

        Raises:
            StoreError: not all of it can be found, as the catalog is damaged. What can be is
                deleted, and the rest has to go as before.
        """
        gone: list[int] = []
        self._finish("doomed", lambda keys: gone.append(sum(map(delete, keys))), text_digests)
        return sum(gone)

    def finish_far(self, delete: Callable[[Sequence[str]], object]) -> None:
        """Delete KV that has to go from a remote store, of all texts that went here before.

        Args:
            delete: deletes the KV of keys there. If it fails, this is to be called again.

        Raises:
            StoreError: as `finish`.
        """
        self._finish("doomed_far", delete)

    def _finish(
        self,
        table: str,
        delete: Callable[[Sequence[str]], object],
        text_digests: Collection[str] | None = None,
    ) -> None:
        while doomed := self._doomed(table, text_digests):
            done = self._done(doomed)
            delete(self._keys(doomed))
            with self._database.transaction() as connection:
                if table == "doomed" and self._database.rows("SELECT * FROM remotes"):
                    far = f"INSERT OR IGNORE INTO doomed_far SELECT * FROM doomed {_DONE}"
                    connection.executemany(far, done)
                connection.executemany(f"DELETE FROM {table} {_DONE}", done)
                connection.execute(DROP_NEEDLESS)
            self._database.scrub()
            self._check(doomed)

    def note_remote(self, label: str) -> None:
        """Remember that KV is in a remote store, too, so that removals are finished there."""
        if label not in self._database.read(str, "SELECT label FROM remotes"):
            with self._database.transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO remotes VALUES (?)", (label,))

    def _doomed(self, table: str, text_digests: Collection[str] | None) -> list[_Doomed]:
        """Those of the tenant's texts, of these or of all, that have to go."""
        query = (
            "SELECT model, text_digest, token_ids, (SELECT count FROM revivals)"
            f" FROM {table} WHERE namespace = ?"
        )
        rows = self._database.rows(query, self._namespace)
        found = [_Doomed(str(m), str(name), unpack(ids), count) for m, name, ids, count in rows]
        return [one for one in found if text_digests is None or one.text_digest in text_digests]

    def _done(self, doomed: Sequence[_Doomed]) -> list[tuple[object, ...]]:
        """Those of these texts, as `_DONE` takes them, whose KV can all be found."""
        whole = {
            model for model in {one.model for one in doomed} if not self._catalog.damage(model)
        }
        return [
            (one.model, self._namespace, one.text_digest, one.revivals)
            for one in doomed
            if one.model in whole
        ]

    def _check(self, doomed: Sequence[_Doomed]) -> None:
        for model in {one.model for one in doomed}:
            if reason := self._catalog.damage(model):
                raise StoreError(f"KV that was to be deleted may still be there: {reason}")

    def _keys(self, doomed: Sequence[_Doomed]) -> list[str]:
        """Every key that the KV of these texts may have."""
        catalog = self._catalog
        behinds = {model: catalog.behinds(model) for model in {one.model for one in doomed}}
        return [
            key
            for one in doomed
            for key in catalog.keys_of(one.model, one.token_ids, behinds[one.model])
        ]


def _put(table: str, key: str, columns: str) -> str:
    """SQL that adds a row of one model and tenant, or mends the row of that key if it differs."""
    names = f"model, namespace, {key}, {columns}"
    marks = ", ".join("?" * len(names.split(",")))
    new = ", ".join(f"excluded.{name.strip()}" for name in columns.split(","))
    return (
        f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT (model, namespace, {key})"
        f" DO UPDATE SET ({columns}) = ({new}) WHERE ({columns}) IS NOT ({new})"
    )


def _record(row: Row) -> ChunkRecord:
    _, text_digest, anchor, length, ids, starts, _ = row
    return ChunkRecord(str(text_digest), str(anchor), int(str(length)), unpack(ids), unpack(starts))
