"""Texts are forgotten in an order that survives a kill and loses no race.

First the catalog says, in one transaction, that they are no modules any more and that their KV is
to go; then their KV goes; then the catalog forgets that it had to. Who puts KV there looks into the
catalog afterwards, so KV that comes too late is taken back by whoever brought it. Knows no text.
"""

from __future__ import annotations

from collections.abc import Collection

from cached_rag.kv.store.base import KVStore
from cached_rag.kv.store.catalog import Catalog


def remove(catalog: Catalog, store: KVStore, text_digests: Collection[str]) -> int:
    """Forget the catalog's tenant's texts, by whatever model; says how many KVs went."""
    catalog.doom(text_digests)
    return finish(catalog, store, text_digests)


def finish(catalog: Catalog, store: KVStore, text_digests: Collection[str] | None = None) -> int:
    """Do what is left of removals, of all or of these; says how many KVs went."""
    doomed = [
        one for one in catalog.doomed() if text_digests is None or one.text_digest in text_digests
    ]
    gone = sum(store.delete(key) for one in doomed for key in one.keys)
    if doomed:
        catalog.bury(doomed)
    return gone
