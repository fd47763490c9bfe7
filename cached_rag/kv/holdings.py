"""Whose KV a store's folder holds, whether anything still needs it, and how what has to go goes.

A file's key is a digest, which does not say whose it is. So the keys of all that the catalog knows
are computed, and compared with those of the files, whatever codec these are in. Texts are removed
so that it survives a kill at any point, and other processes that write. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cached_rag.config import StoreConfig
from cached_rag.errors import ConfigError, CorruptBlobError, StoreError
from cached_rag.kv.catalog import (
    CATALOG,
    DROP_NEEDLESS,
    Behind,
    Catalog,
    ChunkRecord,
    Maker,
    inner_ids,
)
from cached_rag.kv.database import IN_MEMORY
from cached_rag.kv.files import is_file, is_folder
from cached_rag.kv.fingerprint import digest

if TYPE_CHECKING:
    from cached_rag.kv.disk import DiskStore
    from cached_rag.kv.kept import KeptPrompts
    from cached_rag.kv.remote import RemoteTier

_log = logging.getLogger(__name__)
# Where in a store's folder finished prompts are kept.
FOLDER = "prompts"
_DOOM = "INSERT OR IGNORE INTO doomed (model, namespace, text_digest, token_ids, remote)"
# What has gone from this machine has to go from each store that had KV of this folder.
_OWE = (
    f"{_DOOM} SELECT model, namespace, text_digest, token_ids, label FROM doomed, remotes"
    " WHERE id = ?"
)


class _Doomed(NamedTuple):
    """A text whose KV has to go.

    One that came back, and is doomed anew, has another id: it may have new KV.
    """

    id: int
    model: str
    text_digest: str
    token_ids: tuple[int, ...]


class Removals:
    """The texts of one tenant that have to go, by all models, from here and from a remote store."""

    def __init__(
        self,
        catalog: Catalog,
        delete: Callable[[str], bool],
        remote: RemoteTier | None = None,
    ) -> None:
        """Delete nothing yet.

        Args:
            delete: deletes the KV of a key from this machine, and says whether there was any.
            remote: the remote store; None if there is none. If it fails, `finish_far` is to be
                called again.
        """
        self._catalog, self._namespace = catalog, catalog.namespace
        self._database = catalog.database
        self._delete, self._remote = delete, remote

    def remove(self, text_digests: Collection[str], records: Iterable[ChunkRecord] = ()) -> int:
        """Remove this tenant's texts, and their KV by all models; says how many KVs went here.

        The order survives a kill and loses no race. First the catalog says, in one transaction,
        that the texts are no modules any more and that their KV has to go; then the KV goes; then
        the catalog forgets that it had to. Whoever puts KV into the store looks into the catalog
        when this deletion is over or has yet to come, so KV that comes too late is not kept.

        Args:
            records: those of texts that may be no modules here, though the remote store has KV of
                them, or finished prompts left some.

        Raises:
            StoreError: see `finish`.
        """
        try:
            self.doom(text_digests, records)
            return self.finish(text_digests)
        finally:
            self.finish_far()

    def doom(self, text_digests: Iterable[str], records: Iterable[ChunkRecord] = ()) -> None:
        """Begin to remove texts: they are no modules from now on, and their KV has to go."""
        model = self._catalog.maker.model
        given = [(model, self._namespace, one.text_digest, one.ids) for one in records]
        rows = [(self._namespace, text_digest) for text_digest in text_digests]
        where = "FROM modules WHERE namespace = ? AND text_digest = ?"
        columns = "model, namespace, text_digest, token_ids, ''"
        with self._database.transaction() as connection:
            connection.executemany(f"{_DOOM} SELECT {columns} {where}", rows)
            connection.executemany(f"{_DOOM} VALUES (?, ?, ?, ?, '')", given)
            connection.executemany(f"DELETE {where}", rows)
            connection.execute("UPDATE removals SET count = count + 1")

    def finish(self, text_digests: Collection[str] | None = None) -> int:
        """Delete KV that has to go, of these texts or of all; says how many KVs went.

        Raises:
            StoreError: not all of it can be found, as the catalog is damaged. What can be is
                deleted, and the rest has to go as before.
        """
        gone: list[int] = []
        self._finish("", lambda keys: gone.append(sum(map(self._delete, keys))), text_digests)
        return sum(gone)

    def finish_far(self) -> None:
        """Delete KV that has to go from the remote store, of all texts that went here before.

        Raises:
            StoreError: as `finish`; or the remote store does not answer.
        """
        if (remote := self._remote) is not None:
            self._finish(remote.label, partial(remote.delete, self._namespace))

    def _behinds(self, catalog: Catalog, remote: str) -> set[Behind]:
        """All that texts of a model may stand behind; in a remote store, as others say, too."""
        found = catalog.behinds()
        if remote and self._remote is not None:
            try:
                found.update(self._remote.heads(self._namespace, catalog.maker.model))
            except CorruptBlobError as error:  # nobody finds KV by it either
                _log.warning("KV that other machines encoded may not be deleted: %s", error)
        return found

    def _finish(
        self,
        remote: str,
        delete: Callable[[Sequence[str]], object],
        text_digests: Collection[str] | None = None,
    ) -> None:
        while doomed := self._doomed(remote, text_digests):
            models = {one.model for one in doomed}
            catalogs = {m: self._catalog.of(Maker(m), self._namespace) for m in models}
            damage = {model: why for model in models if (why := catalogs[model].damage())}
            with _owing(remote):
                behinds = {model: self._behinds(catalogs[model], remote) for model in models}
                keys = (
                    catalogs[one.model].keys_of(one.token_ids, behinds[one.model]) for one in doomed
                )
                delete([*chain.from_iterable(keys)])
            if not remote:
                self._forget_kept(doomed)
            done = [(one.id,) for one in doomed if one.model not in damage]
            with self._database.transaction() as connection:
                if not remote:
                    connection.executemany(_OWE, done)
                connection.executemany("DELETE FROM doomed WHERE id = ?", done)
                connection.execute(DROP_NEEDLESS)
            self._database.scrub()
            for why in damage.values():
                raise StoreError(f"KV that was to be deleted may still be there: {why}")

    def _forget_kept(self, doomed: Iterable[_Doomed]) -> None:
        """Delete what finished prompts left of these texts."""
        path = self._database.path
        for kept in kept_prompts(path.parent) if path != IN_MEMORY else ():
            for one in doomed:
                kept.forget(self._namespace, one.text_digest, inner_ids(one.token_ids))

    def note_remote(self, label: str) -> None:
        """Remember that KV is in a remote store, too, so that removals are finished there."""
        if label not in self._database.read(str, "SELECT label FROM remotes"):
            with self._database.transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO remotes VALUES (?)", (label,))

    def _doomed(self, remote: str, text_digests: Collection[str] | None) -> list[_Doomed]:
        """Those of the tenant's texts, of these or of all, that have to go from there."""
        query = "SELECT id, model, text_digest, token_ids FROM doomed"
        query = f"{query} WHERE namespace = ? AND remote = ?"
        rows = self._database.rows(query, self._namespace, remote)
        return [
            _Doomed(int(str(number)), str(model), str(name), self._catalog.tokens(ids))
            for number, model, name, ids in rows
            if text_digests is None or name in text_digests
        ]


@contextmanager
def _owing(remote: str) -> Iterator[None]:
    """Says of a remote store that fails what becomes of what it has."""
    try:
        yield
    except StoreError as error:
        if not remote:
            raise
        raise StoreError(
            f"KV that was to be deleted may still be there: {error}. Delete something else, or "
            "open the index again, when the store answers: then it goes, too"
        ) from error


@dataclass(frozen=True)
class Holding:
    """The KV of one model in a folder: its keys, and the bytes of their files."""

    maker: Maker
    keys: tuple[str, ...]
    nbytes: int


def makers(folder: Path) -> list[Maker]:
    """All models whose KV may be in a folder, in the order in which they came to use it."""
    with _catalogs(folder) as catalogs:
        return [catalog.maker for catalog in catalogs]


def forget(folder: Path, texts: Iterable[str], remote: RemoteTier | None = None) -> int:
    """Remove texts of the tenant "", and their KV by all models; says how many KVs went.

    All texts that were learned from prompts go with them, as they may have the same words.

    Args:
        remote: the remote store that has KV of them, too.

    Raises:
        StoreError: the remote store does not answer; call it again when it does. Or not all KV can
            be found, as the catalog is damaged.
    """
    return forget_digests(folder, {digest(text.strip()) for text in texts}, remote)


def forget_digests(
    folder: Path, text_digests: Collection[str], remote: RemoteTier | None = None
) -> int:
    """As `forget`, given the digests of the texts."""
    if not is_file(folder / CATALOG):
        return 0
    with closing(Catalog(folder / CATALOG, "")) as catalog, closing(_disk(folder)) as disk:
        removals = Removals(catalog, disk.delete, remote)
        learned = catalog.learned() if text_digests else []
        if remote is not None:
            removals.note_remote(remote.label)
        return removals.remove({*text_digests, *learned})


def hold(
    folder: Path,
    texts: Iterable[str],
    max_bytes: int | None,
    *,
    pinned: bool | None,
    until: float | None,
) -> int:
    """Say how long KV of texts of the tenant "" is kept, by all models; see `KVStore.hold`.

    Args:
        max_bytes: the store's bound, of which pins take half at most.

    Raises:
        StoreError: the folder's databases cannot be written, or there are too many pins.
    """
    digests, keys = [digest(text.strip()) for text in texts], list[str]()
    with _catalogs(folder) as catalogs:
        for catalog in catalogs:
            behinds = catalog.behinds()
            for found in catalog.find(digests):
                keys += catalog.keys_of(found.token_ids, behinds)
    if not keys:
        return 0
    with closing(_disk(folder, max_bytes=max_bytes)) as disk:
        return disk.hold(keys, pinned=pinned, until=until)


def unused(folder: Path, name: str, dtypes: Sequence[str]) -> list[Holding]:
    """The KV of all models but one, which is kept in some dtypes.

    Args:
        name: that model's; where several had the name and dtype, the last one is kept.
        dtypes: those to keep.

    Raises:
        ConfigError: that model has no KV in one of these dtypes, so its other KV had better stay.
    """
    found = makers(folder)
    latest = {(maker.name, maker.dtype): maker for maker in found}
    for dtype in dtypes:
        if (name, dtype) not in latest:
            listed = ", ".join(map(str, found)) or "nothing"
            raise ConfigError(
                f"{folder} has no KV of {name} in {dtype} that could be kept, it has {listed}; say "
                "with --dtype which to keep, or ask the index once, so that it is known"
            )
    others = {*found} - {latest[name, dtype] for dtype in dtypes}
    with closing(_disk(folder)) as disk:
        sizes = disk.sizes()
    holdings = []
    with _catalogs(folder) as catalogs:
        for catalog in catalogs:
            if catalog.maker in others:  # none that came meanwhile: it may be the one to keep
                known = set().union(*(tenant.keys() for tenant in catalog.tenants()))
                keys = tuple(known & sizes.keys())
                nbytes = sum(sizes[key] for key in keys)
                holdings.append(Holding(catalog.maker, keys, nbytes))
    return holdings


def strays(folder: Path) -> list[str]:
    """Keys of KV that no model of the catalog has: it learns of KV before the store has it.

    Raises:
        StoreError: that is not known, as the catalog is damaged.
    """
    with closing(_disk(folder)) as disk:
        held = disk.sizes()
    if not is_file(folder / CATALOG):
        return []
    needed: set[str] = set()
    with _catalogs(folder) as catalogs:
        for tenant in chain.from_iterable(catalog.tenants() for catalog in catalogs):
            if reason := tenant.damage():
                raise StoreError(f"what KV nothing needs is not known, so all stays: {reason}")
            needed.update(tenant.keys())
    return [key for key in held if key not in needed]


def drop_strays(folder: Path) -> int:
    """Delete the KV of `strays`; says how many KVs went. Raises as that."""
    with closing(_disk(folder)) as disk:
        return sum(map(disk.delete, strays(folder)))


def unneeded(folder: Path, texts: Callable[[], Iterable[str]]) -> set[str]:
    """Digests of texts that are modules of the tenant "", and that are not among `texts`.

    Args:
        texts: gives all texts that are needed. It is called last: a text that is ingested
            meanwhile is needed first, and a module later.
    """
    with _catalogs(folder) as catalogs:
        known = set().union(*(catalog.text_digests() for catalog in catalogs))
    return known - {digest(text.strip()) for text in texts()}


def held_bytes(
    folder: Path, texts: Collection[str], encodings: int, store: StoreConfig
) -> int | None:
    """Bytes of all KV in a folder, if each of these texts has KV of the last model to use it.

    Of a model that keeps states, chunks have none, so it is enough that it knows them.

    Args:
        encodings: how many of each text there are to be.
        store: the codec, and with what files are signed; if there is a key, others do not count.

    Returns:
        None if some have less.
    """
    with _catalogs(folder) as catalogs:
        if not catalogs:
            return None if texts else 0
        catalog = catalogs[-1]
        if not (store.composes or catalog.prefixes() or catalog.damage()):
            encodings = 0
        with closing(_disk(folder, store.codec, store.signing_key)) as disk:
            sizes = disk.sizes()
            files = (folder / "blobs").glob("*/*")
            held = sizes.keys() & {file.name.split(".")[0] for file in files}
            if store.signing_key:  # a look for each takes its time
                held = {key for key in held if key in disk}
        counts = {name: len(held & {*keys}) for name, keys in catalog.keys_by_text()}
    known = (counts.get(digest(text.strip()), -1) for text in texts)
    return sum(sizes.values()) if all(count >= encodings for count in known) else None


def drop(folder: Path, holding: Holding) -> None:
    """Delete the KV of a model, what prompts left of it too, and forget the model."""
    with closing(_disk(folder)) as disk:
        for key in holding.keys:
            disk.delete(key)
    model = holding.maker.model
    for kept in kept_prompts(folder):
        kept.remove([prompt for prompt in kept.all() if prompt.model == model])
    with closing(Catalog(folder / CATALOG, model)) as catalog:
        catalog.clear()


def kept_prompts(folder: Path, secret: str | None = None) -> Iterator[KeptPrompts]:
    """What finished prompts left, if there is any; `secret` as `DiskStore` has it."""
    if is_folder(folder / FOLDER):
        from cached_rag.kv.kept import KeptPrompts  # with PyTorch

        with closing(KeptPrompts(folder / FOLDER, secret=secret)) as kept:
            yield kept


@contextmanager
def _catalogs(folder: Path) -> Iterator[list[Catalog]]:
    """What the tenant "" has by each model, in the order in which they came to use the folder."""
    if not is_file(folder / CATALOG):
        yield []
        return
    with closing(Catalog(folder / CATALOG, "")) as catalog:
        yield [catalog.of(maker, "") for maker in catalog.makers()]


def _disk(
    folder: Path, codec: str = "raw", secret: str | None = None, max_bytes: int | None = None
) -> DiskStore:
    """The files; those of all codecs are counted and deleted, whatever the store's is."""
    from cached_rag.kv.disk import DiskStore  # with PyTorch, which a look around needs not

    return DiskStore(folder, codec, secret=secret, max_bytes=max_bytes)
