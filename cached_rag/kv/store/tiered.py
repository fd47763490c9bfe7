"""Fast, small stores before slow, large ones. Knows no medium."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cached_rag.errors import ConfigError, CorruptBlobError, StoreFullError
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.store.base import IsWanted, KVStore, Problem
from cached_rag.kv.store.blob import SigningError

_T = TypeVar("_T")


class TieredStore:
    """A `KVStore` over several, fastest first. The last one has all that the others have."""

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
        """The module from the fastest tier that has it, which is copied into the faster ones.

        Raises:
            CorruptBlobError: damaged in one tier, and in no other.
        """
        level, kv = self._first(lambda tier: tier.get(key, token_ids))
        if kv is None or not level:
            return kv
        self._keep(level, key, kv)
        return self.tiers[0].get(key, token_ids) or kv  # on its device

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but unread, and left where it is."""
        _, source = self._first(lambda tier: tier.open(key, token_ids))
        return source

    def _first(self, read: Callable[[KVStore], _T | None]) -> tuple[int, _T | None]:
        """The number of the first tier that has something, and what it has."""
        damage: CorruptBlobError | None = None
        for level, tier in enumerate(self.tiers):
            try:
                found = read(tier)
            except CorruptBlobError as error:
                damage = error
                continue
            if found is not None:
                return level, found
        if damage is not None:
            raise damage
        return 0, None

    def put(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Keep a module in the last tier, and in the faster ones if it fits.

        In these alone, if the last one has it from others and signed, as this process cannot.
        """
        level = len(self.tiers) - 1
        try:
            self.tiers[-1].put(key, kv, wanted)
        except SigningError:
            if not level:
                raise
            self._keep(level, key, kv, wanted)
        else:
            self._keep(level, key, kv)

    def delete(self, key: str) -> bool:
        """Delete an entry from all tiers; says whether any had it.

        From the slowest first: a reader could copy it from there back into the others.
        """
        return sum(tier.delete(key) for tier in reversed(self.tiers)) > 0

    def check(self) -> list[Problem]:
        """Problems of all tiers."""
        return [problem for tier in self.tiers for problem in tier.check()]

    def _keep(self, level: int, key: str, kv: ModuleKV, wanted: IsWanted | None = None) -> None:
        """Put what tier `level` has into the faster ones, unless it is deleted meanwhile.

        Args:
            wanted: says whether it is, where tier `level` does not have it.
        """
        for tier in self.tiers[:level]:
            with contextlib.suppress(StoreFullError):  # too large for a fast tier is no error
                tier.put(key, kv)
        is_wanted = key in self.tiers[level] if wanted is None else wanted()
        if level and not is_wanted:
            for tier in self.tiers[:level]:
                tier.delete(key)
