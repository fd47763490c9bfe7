"""All that a store's folder holds, of whatever model and tenant, by what the catalog knows.

Keys are digests, so whose a file is can only be told by computing the keys anew. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cached_rag.errors import ConfigError
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store.catalog import Catalog, Maker
from cached_rag.kv.store.disk import DiskStore
from cached_rag.kv.store.removal import remove

CATALOG = "catalog.sqlite"


@dataclass(frozen=True)
class Holding:
    """What one model has in a folder: keys of its files, and their bytes."""

    maker: Maker
    keys: tuple[str, ...]
    nbytes: int


def makers(folder: Path) -> list[Maker]:
    """Whose KV there may be in a folder, the latest last."""
    if not (folder / CATALOG).is_file():
        return []
    with closing(_catalog(folder)) as catalog:
        return catalog.makers()


def forget(folder: Path, codec: str, texts: Iterable[str], namespace: str = "") -> int:
    """Drop a tenant's texts and their KV, in whatever dtype; says how many KVs went."""
    return forget_digests(folder, codec, {digest(text.strip()) for text in texts}, namespace)


def forget_digests(
    folder: Path, codec: str, text_digests: Collection[str], namespace: str = ""
) -> int:
    """As `forget`."""
    if not (folder / CATALOG).is_file():
        return 0
    with (
        closing(_catalog(folder, namespace=namespace)) as catalog,
        closing(DiskStore(folder, codec)) as disk,
    ):
        return remove(catalog, disk, text_digests)


def unused(folder: Path, codec: str, name: str, dtypes: Sequence[str]) -> list[Holding]:
    """What models have that are not, at their latest, the one of that name in one of these dtypes.

    Raises:
        ConfigError: a dtype in which that model has nothing; then dropping the rest is no help.
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
    with closing(DiskStore(folder, codec)) as disk:
        sizes = disk.sizes()
    holdings = []
    for maker in found:
        if maker not in kept:
            keys = tuple(key for key in _all_keys(folder, maker) if key in sizes)
            holdings.append(Holding(maker, keys, sum(sizes[key] for key in keys)))
    return holdings


def strays(folder: Path, codec: str) -> list[str]:
    """Keys of KV that nothing needs that anybody knows of. Who puts KV there has said so before."""
    with closing(DiskStore(folder, codec)) as disk:
        held = disk.sizes()
    if not (folder / CATALOG).is_file():
        return []
    needed = {key for maker in makers(folder) for key in _all_keys(folder, maker)}
    return [key for key in held if key not in needed]


def drop_strays(folder: Path, codec: str) -> None:
    """Delete them."""
    keys = strays(folder, codec)
    with closing(DiskStore(folder, codec)) as disk:
        for key in keys:
            disk.delete(key)


def unneeded(folder: Path, texts: Callable[[], Iterable[str]]) -> set[str]:
    """Digests of texts that are modules of the tenant without a name, and not among `texts`.

    Args:
        texts: what is needed; asked for last, for a text is needed before it is a module.
    """
    known: set[str] = set()
    for maker in makers(folder):
        with closing(_catalog(folder, maker.model)) as catalog:
            known |= catalog.text_digests()
    return known - {digest(text.strip()) for text in texts()}


def drop(folder: Path, codec: str, holding: Holding) -> None:
    """Delete what a model has, and forget the model."""
    with closing(DiskStore(folder, codec)) as disk:
        for key in holding.keys:
            disk.delete(key)
    with closing(_catalog(folder, holding.maker.model)) as catalog:
        catalog.clear()


def _all_keys(folder: Path, maker: Maker) -> set[str]:
    """Of a model's modules and prefixes, of all tenants."""
    keys: set[str] = set()
    with closing(_catalog(folder, maker.model)) as catalog:
        namespaces = catalog.namespaces()
    for namespace in namespaces:
        with closing(_catalog(folder, maker.model, namespace)) as catalog:
            keys.update(catalog.keys())
    return keys


def _catalog(folder: Path, model: str = "", namespace: str = "") -> Catalog:
    return Catalog(folder / CATALOG, model, namespace)
