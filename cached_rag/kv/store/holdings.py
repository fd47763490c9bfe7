"""All that a store's folder holds, of whatever model and tenant, by what the catalog knows.

Keys are digests, so whose a file is can only be told by computing the keys anew. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cached_rag.errors import ConfigError
from cached_rag.kv.fingerprint import digest, module_key
from cached_rag.kv.store.catalog import Catalog, Maker, ModuleRecord
from cached_rag.kv.store.disk import DiskStore

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
    digests = [digest(text.strip()) for text in texts]
    gone = 0
    for maker in makers(folder):
        with (
            closing(_catalog(folder, maker.model, namespace)) as catalog,
            closing(DiskStore(folder, codec)) as disk,
        ):
            gone += sum(map(disk.delete, _keys(catalog, catalog.find(digests))))
            catalog.remove_modules(digests)
    return gone


def unused(folder: Path, codec: str, name: str, dtypes: Sequence[str]) -> list[Holding]:
    """What models have that are not, at their latest, the one of that name in one of these dtypes.

    KV of schemas is not among it: the catalog does not know it.

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
            keys.update(_keys(catalog, (record for _, record in catalog.modules())))
            prefixes = [prefix_ids for prefix_ids, _ in catalog.prefixes()]
        keys.update(module_key(maker.model, (), ids, namespace) for ids in prefixes)
    return keys


def _keys(catalog: Catalog, modules: Iterable[ModuleRecord]) -> Iterator[str]:
    """The keys that modules' KV may have."""
    behinds = {((), ""), *catalog.prefixes()}
    for module in modules:
        for prefix_ids, context in behinds:
            yield module_key(
                catalog.maker.model, prefix_ids, module.token_ids, catalog.namespace, context
            )


def _catalog(folder: Path, model: str = "", namespace: str = "") -> Catalog:
    return Catalog(folder / CATALOG, model, namespace)
