"""Fast, small stores before slow, large ones. Knows no medium."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from cached_rag.errors import ConfigError, CorruptBlobError, StoreFullError
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.store.base import KVStore, Problem


class TieredStore:
    """A `KVStore` over several, fastest first. The last one holds everything."""

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("a tiered store needs at least one tier")
        self.tiers = tuple(tiers)

    @property
    def nbytes(self) -> int:
        """Bytes in the last tier."""
        return self.tiers[-1].nbytes

    def __len__(self) -> int:
        return len(self.tiers[-1])

    def __contains__(self, key: str) -> bool:
        return any(key in tier for tier in self.tiers)

    def keys(self) -> Iterator[str]:
        """Keys of the last tier, least recently used first."""
        return self.tiers[-1].keys()

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module from the fastest tier that has it, promoted into the faster ones.

        Raises:
            CorruptBlobError: damaged in one tier, and in no other.
        """
        damage: CorruptBlobError | None = None
        for level, tier in enumerate(self.tiers):
            try:
                kv = tier.get(key, token_ids)
            except CorruptBlobError as error:
                damage = error
                continue
            if kv is not None:
                self._keep(self.tiers[:level], key, kv)
                promoted = self.tiers[0].get(key, token_ids) if level else None
                return promoted or kv
        if damage is not None:
            raise damage
        return None

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """The module from the fastest tier that has it, where it is; `get` promotes it.

        Raises:
            CorruptBlobError: damaged in one tier, and in no other.
        """
        damage: CorruptBlobError | None = None
        for tier in self.tiers:
            try:
                source = tier.open(key, token_ids)
            except CorruptBlobError as error:
                damage = error
                continue
            if source is not None:
                return source
        if damage is not None:
            raise damage
        return None

    def put(self, key: str, kv: ModuleKV) -> None:
        """Keep a module in the last tier, and in the faster ones if it fits."""
        self.tiers[-1].put(key, kv)
        self._keep(self.tiers[:-1], key, kv)

    def delete(self, key: str) -> bool:
        """Forget an entry in all tiers; says whether any had it."""
        return sum(tier.delete(key) for tier in self.tiers) > 0

    def check(self) -> list[Problem]:
        """Problems of all tiers."""
        return [problem for tier in self.tiers for problem in tier.check()]

    @staticmethod
    def _keep(tiers: Sequence[KVStore], key: str, kv: ModuleKV) -> None:
        for tier in tiers:
            with contextlib.suppress(StoreFullError):  # too large for a fast tier is no error
                tier.put(key, kv)
