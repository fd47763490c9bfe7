"""Whose KV a store's folder holds: of which model, and whether anything still needs it.

A file's key is a digest, which does not say whose it is. So the keys of all that the catalog knows
are computed, and compared with those of the files, whatever codec these are in. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cached_rag.errors import ConfigError, StoreError
from cached_rag.kv.catalog import Catalog, Maker
from cached_rag.kv.fingerprint import digest

if TYPE_CHECKING:
    from cached_rag.kv.disk import DiskStore
    from cached_rag.kv.remote import RemoteTier

CATALOG = "catalog.sqlite"


@dataclass(frozen=True)
class Holding:
    """The KV of one model in a folder: its keys, and the bytes of their files."""

    maker: Maker
    keys: tuple[str, ...]
    nbytes: int


def makers(folder: Path) -> list[Maker]:
    """All models whose KV may be in a folder, in the order in which they came to use it."""
    if not (folder / CATALOG).is_file():
        return []
    with closing(_catalog(folder)) as catalog:
        return catalog.makers()


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
    if not (folder / CATALOG).is_file():
        return 0
    with closing(_catalog(folder)) as catalog, closing(_disk(folder)) as disk:
        learned = catalog.learned() if text_digests else []
        if remote is not None:
            catalog.removals.note_remote(remote.label)
        try:
            return catalog.removals.remove(disk.delete, {*text_digests, *learned})
        finally:
            if remote is not None:
                catalog.removals.finish_far(partial(remote.delete, ""))


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
    kept = [latest[name, dtype] for dtype in dtypes]
    with closing(_disk(folder)) as disk:
        sizes = disk.sizes()
    holdings = []
    for maker in found:
        if maker not in kept:
            known = [set(catalog.keys()) for catalog in _catalogs(folder, maker)]
            keys = tuple(set().union(*known) & sizes.keys())
            holdings.append(Holding(maker, keys, sum(sizes[key] for key in keys)))
    return holdings


def strays(folder: Path) -> list[str]:
    """Keys of KV that no model of the catalog has: it learns of KV before the store has it.

    Raises:
        StoreError: that is not known, as the catalog is damaged.
    """
    with closing(_disk(folder)) as disk:
        held = disk.sizes()
    if not (folder / CATALOG).is_file():
        return []
    needed: set[str] = set()
    for maker in makers(folder):
        for catalog in _catalogs(folder, maker):
            if reason := catalog.damage():
                raise StoreError(f"what KV nothing needs is not known, so all stays: {reason}")
            needed.update(catalog.keys())
    return [key for key in held if key not in needed]


def drop_strays(folder: Path) -> int:
    """Delete the KV of `strays`; says how many KVs went. Raises as that."""
    keys = strays(folder)
    with closing(_disk(folder)) as disk:
        return sum(map(disk.delete, keys))


def unneeded(folder: Path, texts: Callable[[], Iterable[str]]) -> set[str]:
    """Digests of texts that are modules of the tenant "", and that are not among `texts`.

    Args:
        texts: gives all texts that are needed. It is called last: a text that is ingested
            meanwhile is needed first, and a module later.
    """
    known: set[str] = set()
    for maker in makers(folder):
        with closing(_catalog(folder, maker.model)) as catalog:
            known |= catalog.text_digests()
    return known - {digest(text.strip()) for text in texts()}


def held_bytes(folder: Path, texts: Collection[str], encodings: int) -> int | None:
    """Bytes of all KV in a folder, if each of these texts has KV of the last model to use it.

    Args:
        encodings: how many of each text there are to be.

    Returns:
        None if some have less.
    """
    if not (found := makers(folder)):
        return None if texts else 0
    with closing(_disk(folder)) as disk:
        sizes = disk.sizes()
    with closing(_catalog(folder, found[-1].model)) as catalog:
        counts = catalog.counts(sizes)
    known = (counts.get(digest(text.strip()), 0) for text in texts)
    return sum(sizes.values()) if all(count >= encodings for count in known) else None


def drop(folder: Path, holding: Holding) -> None:
    """Delete the KV of a model, and forget the model."""
    with closing(_disk(folder)) as disk:
        for key in holding.keys:
            disk.delete(key)
    with closing(_catalog(folder, holding.maker.model)) as catalog:
        catalog.clear()


def _catalogs(folder: Path, maker: Maker) -> Iterator[Catalog]:
    """What all tenants have by a model."""
    with closing(_catalog(folder, maker.model)) as catalog:
        namespaces = catalog.namespaces()
    for namespace in namespaces:
        with closing(_catalog(folder, maker.model, namespace)) as catalog:
            yield catalog


def _disk(folder: Path) -> DiskStore:
    """The files of all codecs: what is counted and deleted here does not depend on the store's."""
    from cached_rag.kv.disk import DiskStore  # with PyTorch, which a look around needs not

    return DiskStore(folder)


def _catalog(folder: Path, model: str = "", namespace: str = "") -> Catalog:
    return Catalog(folder / CATALOG, model, namespace)
