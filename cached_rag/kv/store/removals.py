"""Texts that are removed from a catalog, and what has to go with them.

Survives a kill at any point, and other processes that write. Knows SQLite; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from cached_rag.errors import StoreError
from cached_rag.kv.fingerprint import module_key
from cached_rag.kv.store.database import Database
from cached_rag.kv.store.tables import DROP_NEEDLESS, unpack

# Not if one came back and is doomed anew meanwhile: it may have new KV.
_DONE = "WHERE model = ? AND namespace = ? AND text_digest = ? AND (SELECT count FROM revivals) = ?"
# Deletes the KV of a key, and says whether there was any.
Delete = Callable[[str], bool]


class _Doomed(NamedTuple):
    """A text whose KV has to go, and how many such texts had come back when this was read."""

    model: str
    text_digest: str
    token_ids: tuple[int, ...]
    revivals: object


class Removals:
    """The texts of one tenant that have to go, by all models, from here and from a remote store."""

    def __init__(
        self,
        database: Database,
        namespace: str,
        behinds: Callable[[str], Collection[tuple[tuple[int, ...], str]]],
        damage: Callable[[str], str],
    ) -> None:
        """Make it for a catalog's file.

        Args:
            behinds: given a model, all that its texts may have been encoded behind: the tokens of
                a prefix, and the name of a context.
            damage: given a model, why these are not all; empty if they are.
        """
        self._database, self._namespace = database, namespace
        self._behinds, self._damage = behinds, damage

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
        gone = 0
        while doomed := self._doomed("doomed", text_digests):
            done = self._done(doomed)
            gone += sum(map(delete, self._keys(doomed)))
            with self._database.transaction() as connection:
                if self._database.read(int, "SELECT count(*) FROM remotes") != [0]:
                    far = f"INSERT OR IGNORE INTO doomed_far SELECT * FROM doomed {_DONE}"
                    connection.executemany(far, done)
                connection.executemany(f"DELETE FROM doomed {_DONE}", done)
                connection.execute(DROP_NEEDLESS)
            self._database.scrub()
            self._check(doomed)
        return gone

    def finish_far(self, delete: Callable[[Sequence[str]], object]) -> None:
        """Delete KV that has to go from a remote store, of all texts that went here before.

        Args:
            delete: deletes the KV of keys there. If it fails, this is to be called again.

        Raises:
            StoreError: as `finish`.
        """
        while doomed := self._doomed("doomed_far"):
            done = self._done(doomed)
            delete(self._keys(doomed))
            with self._database.transaction() as connection:
                connection.executemany(f"DELETE FROM doomed_far {_DONE}", done)
                connection.execute(DROP_NEEDLESS)
            self._database.scrub()
            self._check(doomed)

    def note_remote(self, label: str) -> None:
        """Remember that KV is in a remote store, too, so that removals are finished there."""
        if [label] not in [list(row) for row in self._database.rows("SELECT label FROM remotes")]:
            with self._database.transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO remotes VALUES (?)", (label,))

    def _doomed(self, table: str, text_digests: Collection[str] | None = None) -> list[_Doomed]:
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
        whole = {model for model in {one.model for one in doomed} if not self._damage(model)}
        return [
            (one.model, self._namespace, one.text_digest, one.revivals)
            for one in doomed
            if one.model in whole
        ]

    def _check(self, doomed: Sequence[_Doomed]) -> None:
        for model in {one.model for one in doomed}:
            if reason := self._damage(model):
                raise StoreError(f"KV that was to be deleted may still be there: {reason}")

    def _keys(self, doomed: Sequence[_Doomed]) -> list[str]:
        """Every key that the KV of these texts may have."""
        behinds = {model: self._behinds(model) for model in {one.model for one in doomed}}
        return [
            module_key(one.model, prefix, one.token_ids, self._namespace, context)
            for one in doomed
            for prefix, context in behinds[one.model]
        ]
