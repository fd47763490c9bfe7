"""All that a store's folder holds, of whatever model and tenant, by what the catalog knows.

Keys are digests, so whose a file is can only be told by computing the keys anew. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from cached_rag.fingerprint import digest, module_key
from cached_rag.store.catalog import Catalog, ModuleRecord, Scope, scopes
from cached_rag.store.disk import DiskStore

CATALOG = "catalog.sqlite"


def forget(folder: Path, codec: str, texts: Iterable[str], namespace: str = "") -> int:
    """Drop a tenant's texts and their KV, in whatever dtype; says how many KVs went."""
    if not (folder / CATALOG).is_file():
        return 0
    digests = [digest(text.strip()) for text in texts]
    gone = 0
    with closing(DiskStore(folder, codec)) as disk:
        for scope in scopes(folder / CATALOG):
            if scope.namespace != namespace:
                continue
            with closing(Catalog(folder / CATALOG, scope.model, scope.namespace)) as catalog:
                gone += sum(map(disk.delete, keys(scope, catalog, catalog.find(digests))))
                catalog.remove_modules(digests)
    return gone


def keys(scope: Scope, catalog: Catalog, modules: Iterable[ModuleRecord]) -> Iterator[str]:
    """The keys that modules' KV may have."""
    behinds = {((), ""), *catalog.prefixes()}
    for module in modules:
        for prefix_ids, context in behinds:
            yield module_key(scope.model, prefix_ids, module.token_ids, scope.namespace, context)
