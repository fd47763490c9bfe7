"""How a run's KV is made, and the name under which it is kept. Knows units; computes no KV."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.kv.fingerprint import digest
from cached_rag.library.matching import EncodedAfter
from cached_rag.pml.layout import Ids, Run
from cached_rag.pml.units import Unit, Units


@dataclass(frozen=True)
class Recipe:
    """How one run's KV is made, as far as its identity needs it.

    Attributes:
        unit: encoding it gives the KV.
        name: differs wherever the KV would.
        ids: the run's.
        seen: digest of the tokens and positions up to the run's end, if its KV is what prefill of
            exactly these would compute; else None.
    """

    unit: Unit
    name: str
    ids: Ids
    seen: str | None

    @property
    def source(self) -> tuple[EncodedAfter, Ids]:
        """By what the library has the KV."""
        return EncodedAfter((), f"pml:{self.name}"), self.ids


class Trail:
    """A digest of tokens and where they stand, that grows token by token."""

    def __init__(self, *, is_movable: bool) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._origin: int | None = None if is_movable else 0

    def add(self, ids: Sequence[int], start: int) -> str:
        """Append tokens at positions `start...`; the digest of all there are now.

        Of keys that can be moved only distances count.
        """
        if self._origin is None:
            self._origin = start
        pairs = array("q", bytes(16 * len(ids)))
        pairs[0::2] = array("q", ids)
        first = start - self._origin
        pairs[1::2] = array("q", range(first, first + len(ids)))
        self._hash.update(pairs.tobytes())
        return self._hash.hexdigest()


class Recipes:
    """The recipe of every run, whatever a prompt imports.

    Attributes:
        of: the recipes of a unit's runs.
        single: of all runs, as their modules' own units have them.
    """

    def __init__(self, units: Units, *, is_compact: bool, is_movable: bool, room: int) -> None:
        """Settle all names.

        Args:
            is_compact: prompts have no gaps; a scaffold is encoded without them, too, so that it is
                what full prefill would compute.
            is_movable: keys can be moved, so that it matters not where, but how far apart tokens
                stand.
            room: positions that the model has, before its frequencies change.
        """
        self._is_compact, self._is_movable, self._room = is_compact, is_movable, room
        self.single: dict[Run, Recipe] = {}
        self.of: dict[Unit, dict[Run, Recipe]] = {}
        for unit in units.single:
            self.of[unit] = self._recipes(unit)
            self.single |= self.of[unit]
        for unit in units.scaffolds:
            self.of[unit] = self._recipes(unit)

    def _recipes(self, unit: Unit) -> dict[Run, Recipe]:
        trail, is_true = Trail(is_movable=self._is_movable), True
        names = []
        found: dict[Run, Recipe] = {}
        at = self.positions(unit)
        for run in unit.context:
            seen = trail.add(run.ids, at[run])
            known = self.single[run]
            names.append(known.name)
            is_true = is_true and known.seen == seen
        before = digest(*names)
        for run in unit.runs:
            seen = trail.add(run.fill, at[run])
            if run.is_cached:
                name = digest(before, seen)
                found[run] = Recipe(unit, name, run.ids, seen if is_true else None)
        return found

    def positions(self, unit: Unit) -> dict[Run, int]:
        """Where a unit and its context stand while it is encoded."""
        every = (*unit.context, *unit.runs)
        is_beyond = unit.runs[-1].end > self._room
        is_closed = is_beyond or (self._is_compact and unit.is_scaffold)
        if not (is_closed and self._is_movable):
            return {run: run.start for run in every}
        found, position = {}, 0
        for run in every:
            found[run] = position
            position += run.length
        return found
