"""Remembers which texts are modules, so that prompts can be searched for them after a restart.

It also remembers what modules stand behind; so, from a text's tokens, it can name every key that
the text's KV may have. Knows SQLite; knows no tensor.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from pathlib import Path

from cached_rag.kv.database import PATIENCE_S, Database, Problem, Row, is_sound, row_sum
from cached_rag.kv.fingerprint import ids_digest, module_key

_log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS modules (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, namespace TEXT NOT NULL,
    text_digest TEXT NOT NULL, anchor TEXT NOT NULL, length INTEGER NOT NULL,
    token_ids BLOB NOT NULL, token_starts BLOB NOT NULL, checksum TEXT NOT NULL,
    learned INTEGER NOT NULL DEFAULT 1,  -- until somebody gives it
    UNIQUE (model, namespace, text_digest)
);
CREATE INDEX IF NOT EXISTS modules_in_order ON modules (model, namespace);  -- and row number
CREATE INDEX IF NOT EXISTS learned ON modules (namespace) WHERE learned;
CREATE TABLE IF NOT EXISTS encodings (
    model TEXT NOT NULL, namespace TEXT NOT NULL, digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    context TEXT NOT NULL, checksum TEXT NOT NULL,
    PRIMARY KEY (model, namespace, digest, context)
);
CREATE TABLE IF NOT EXISTS makers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    dtype TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS removals (count INTEGER NOT NULL);
INSERT INTO removals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM removals);
CREATE TABLE IF NOT EXISTS others (
    model TEXT NOT NULL, namespace TEXT NOT NULL, digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    context TEXT NOT NULL, PRIMARY KEY (model, namespace, digest, context)
);
CREATE TABLE IF NOT EXISTS doomed (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, namespace TEXT NOT NULL,
    text_digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    remote TEXT NOT NULL,  -- empty: from this machine
    UNIQUE (model, namespace, text_digest, remote)
);
CREATE TABLE IF NOT EXISTS remotes (label TEXT PRIMARY KEY);
"""
_SIGNED = {
    "modules": "id, text_digest, anchor, length, token_ids, token_starts",
    "encodings": "rowid, token_ids, context",
}
# Its file in a store's folder.
CATALOG = "catalog.sqlite"
# The tokens at a chunk's borders may differ in a prompt, because characters merge with those of the
# neighbours. So many tokens at each end may be missing in a match.
MAX_TRIM = 4
# Of a model that is forgotten, what texts were encoded behind is kept while KV of it has to go.
_NEEDED = ("makers", "modules", "doomed")
DROP_NEEDLESS = "DELETE FROM encodings WHERE " + " AND ".join(
    f"NOT EXISTS (SELECT 1 FROM {table} t WHERE t.model = encodings.model)" for table in _NEEDED
)
_MODULES = f"SELECT {_SIGNED['modules']}, checksum FROM modules WHERE model = ? AND namespace = ?"
_PREFIXES = f"SELECT {_SIGNED['encodings']}, checksum FROM encodings"
# Modules that are read at a time: an index may have more than fit memory as rows.
_PAGE = 10_000
# What a text was encoded behind: the tokens of a prefix, and the name of a context.
Behind = tuple[tuple[int, ...], str]
_ALONE: Behind = ((), "")


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A text that is a module. Processes know all modules of an index, so it is kept small.

    Attributes:
        text_digest: digest of the text.
        anchor: the text's first 32 characters.
        length: the text's length in characters.
        ids, starts: `token_ids` and `token_starts`, packed.
    """

    text_digest: str
    anchor: str
    length: int
    ids: bytes
    starts: bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text's tokens, when it is tokenised alone."""
        return unpack(self.ids)

    @property
    def token_starts(self) -> tuple[int, ...]:
        """For each token, the character of the text at which it begins."""
        return unpack(self.starts)

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.ids) // array("i").itemsize


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
        database: the file.
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
        self.database = Database(Path(path), _SCHEMA)
        if self.maker.name and not self.database.is_read_only:
            self._sign()

    def of(self, maker: Maker, namespace: str) -> Catalog:
        """What another tenant has by another model, in the same open file."""
        other = copy(self)
        other.maker, other.namespace, other._scope = maker, namespace, (maker.model, namespace)
        return other

    def close(self) -> None:
        """Release the file."""
        self.database.close()

    def _sign(self) -> None:
        mine = (self.maker.name, self.maker.dtype)
        alike = [maker for maker in self.makers() if (maker.name, maker.dtype) == mine]
        if alike[-1:] == [self.maker]:
            return
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO makers (model, name, dtype) VALUES (?, ?, ?)",
                astuple(self.maker),
            )

    def check(self) -> list[Problem]:
        """What is damaged: the file, or rows of any model and tenant."""
        queries = {t: f"SELECT {columns}, checksum FROM {t}" for t, columns in _SIGNED.items()}
        return self.database.check(queries)

    def damage(self) -> str:
        """Why not all keys can be named that KV of this model and tenant has; empty if they can."""
        damaged = next((row for row in self._prefix_rows() if not is_sound(row)), None)
        if damaged is None:
            return ""
        path = self.database.path
        return (
            f"row {damaged[0]} of encodings in {path} is damaged, so KV of texts that stand behind "
            "it cannot be found; ingest the documents again, which mends it, and do this again. If "
            f"that does not help, delete {path.parent} and ingest"
        )

    def makers(self) -> list[Maker]:
        """All models whose KV may be in the store, in the order in which they came to use it."""
        return self.database.read(Maker, "SELECT model, name, dtype FROM makers ORDER BY id")

    def makers_of(self, text_digests: Iterable[str]) -> list[Maker]:
        """Other models that know some of these texts."""
        known = "SELECT 1 FROM modules WHERE model = makers.model AND namespace = ?"
        query = (
            "SELECT model, name, dtype FROM makers WHERE model != ? AND EXISTS"
            f" ({known} AND text_digest IN (SELECT value FROM json_each(?))) ORDER BY id"
        )
        listed = json.dumps([*text_digests])
        return self.database.read(Maker, query, self.maker.model, self.namespace, listed)

    def tenants(self) -> list[Catalog]:
        """What each tenant has that has modules, prefixes or schemas of this model."""
        tables = ("modules", "encodings", "others")
        query = " UNION ".join(f"SELECT namespace FROM {table} WHERE model = ?" for table in tables)
        names = self.database.read(str, query, *[self.maker.model] * len(tables))
        return [self.of(self.maker, name) for name in names]

    def clear(self) -> None:
        """Forget this model, for all tenants, but for KV of it that still has to go."""
        model = self.maker.model
        with self.database.transaction() as connection:
            for table in ("modules", "others", "makers"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (model,))
            # Nobody will use the model again, and so mend these; see `damage`.
            rows = self.database.rows(f"{_PREFIXES} WHERE model = ?", model)
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
        found = [(r.text_digest, r.anchor, r.length, r.ids, r.starts) for r in records]
        if not found:
            return
        rows = [(*self._scope, *values, row_sum(*values)) for values in found]
        sql = _put("modules", "text_digest", "anchor, length, token_ids, token_starts, checksum")
        where = "WHERE model = ? AND namespace = ? AND text_digest = ?"
        names = [row[:3] for row in rows]
        with self.database.transaction(patience_s) as connection:
            connection.executemany(sql, rows)
            connection.executemany(f"DELETE FROM doomed {where}", names)
            if not learned:
                connection.executemany(f"UPDATE modules SET learned = 0 {where} AND learned", names)

    def learned(self) -> list[str]:
        """The tenant's texts that were marked so, for any model; the oldest first."""
        query = "SELECT text_digest FROM modules WHERE namespace = ? AND learned ORDER BY id"
        return self.database.read(str, query, self.namespace)

    def find(self, text_digests: Iterable[str]) -> list[ChunkRecord]:
        """Those of these texts that are modules."""
        query = f"{_MODULES} AND text_digest = ?"
        rows = (self.database.rows(query, *self._scope, name) for name in text_digests)
        return [_record(row) for found in rows for row in self.database.sound(found)]

    def modules(self, after: int = 0) -> Iterator[tuple[int, ChunkRecord]]:
        """(row number, record) of all modules that were added after a row, in order."""
        query = f"{_MODULES} AND id > ? ORDER BY id LIMIT {_PAGE}"
        while rows := self.database.rows(query, *self._scope, after):
            for row in self.database.sound(rows):
                yield int(str(row[0])), _record(row)
            after = int(str(rows[-1][0]))

    def text_digests(self) -> set[str]:
        """Digests of all texts that are modules."""
        query = "SELECT text_digest FROM modules WHERE model = ? AND namespace = ?"
        return set(self.database.read(str, query, *self._scope))

    def keys(self) -> Iterator[str]:
        """All keys that KV of this model and tenant may have; see `damage`, too."""
        for _, found in self.keys_by_text():
            yield from found
        for ids, _ in self.behinds():
            yield from self.keys_of(ids, [_ALONE])
        query = "SELECT token_ids, context FROM others WHERE model = ? AND namespace = ?"
        for packed, context in self.database.rows(query, *self._scope):
            yield from self.keys_of(self.tokens(packed), [((), str(context))])

    def tokens(self, packed: object) -> tuple[int, ...]:
        """The tokens in a row without a checksum; none, which is logged, if they are damaged."""
        try:
            return unpack(packed)
        except (TypeError, ValueError):
            _log.warning(
                "a row in %s is damaged and left out; KV that it stands for may stay until "
                "cached-rag store prune",
                self.database.path,
            )
            return ()

    def keys_by_text(self) -> Iterator[tuple[str, list[str]]]:
        """Of each module the digest of its text, and the keys that its KV may have."""
        behinds = self.behinds()
        for _, module in self.modules():
            yield module.text_digest, self.keys_of(module.token_ids, behinds)

    def keys_of(self, ids: Sequence[int], behinds: Iterable[Behind]) -> list[str]:
        """The keys of KV of these tokens, encoded behind each of these."""
        model, namespace = self._scope
        return [module_key(model, prefix, ids, namespace, name) for prefix, name in behinds]

    def behinds(self) -> set[Behind]:
        """All that texts may have been encoded behind."""
        return {_ALONE, *self.prefixes()}

    def add_prefix(self, token_ids: Sequence[int], context: str = "") -> None:
        """Remember that modules are encoded behind a prefix, and behind a context of that name."""
        values = (pack(token_ids), context)
        row = (*self._scope, ids_digest(token_ids), context, values[0], row_sum(*values))
        sql = _put("encodings", "digest, context", "token_ids, checksum")
        with self.database.transaction() as connection:
            connection.execute(sql, row)

    def add_other(self, token_ids: Sequence[int], context: str) -> None:
        """Remember that there is KV of tokens that no prompt is searched for: a schema's."""
        row = (*self._scope, ids_digest(token_ids), pack(token_ids), context)
        with self.database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO others VALUES (?, ?, ?, ?, ?)", row)

    def prefixes(self) -> list[Behind]:
        """All prefixes that modules are encoded behind."""
        rows = self.database.sound(self._prefix_rows())
        return [(unpack(ids), str(context)) for _, ids, context, _ in rows]

    def _prefix_rows(self) -> list[Row]:
        query = f"{_PREFIXES} WHERE model = ? AND namespace = ?"
        return self.database.rows(query, *self._scope)

    def generation(self) -> int:
        """A number that grows with each removal."""
        (count,) = self.database.read(int, "SELECT count FROM removals")
        return count


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
    packed = bytes(ids), bytes(starts)  # type: ignore[call-overload]
    return ChunkRecord(str(text_digest), str(anchor), int(str(length)), *packed)


def inner_ids(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of a chunk without its borders: every prompt that contains it has them.

    Of a short one a quarter is taken off at each end, as what is left must be told from others.
    """
    count = len(token_ids)
    trim = MAX_TRIM if count > 2 * MAX_TRIM else max(1, count // 4)
    return token_ids[trim : count - trim] or token_ids


def pack(numbers: Sequence[int]) -> bytes:
    """Numbers as a blob of 32-bit integers."""
    return array("i", numbers).tobytes()


def unpack(data: object) -> tuple[int, ...]:
    """What `pack` has packed."""
    numbers = array("i")
    numbers.frombytes(data)  # type: ignore[arg-type]
    return tuple(numbers)
