"""How each run's KV is made, and the name it is kept under. Knows units; computes no KV."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.kv.fingerprint import digest
from cached_rag.library.matching import EncodedAfter
from cached_rag.pml.layout import Ids, ModuleRun
from cached_rag.pml.units import Unit, Units


@dataclass(frozen=True)
class Recipe:
    """How one run's KV is made.

    Attributes:
        unit: the unit with which the run is encoded.
        name: a digest of everything that the KV depends on: other KV has another name.
        ids: the run's token ids.
        seen: digest of all tokens and positions up to the run's end, if the KV equals what a
            prefill of exactly these would compute; None if it does not.
    """

    unit: Unit
    name: str
    ids: Ids
    seen: str | None

    @property
    def source(self) -> tuple[EncodedAfter, Ids]:
        """The key of the KV in the library."""
        return EncodedAfter((), f"pml:{self.name}"), self.ids


class Trail:
    """A digest of a sequence of tokens and their positions, to which tokens can be added.

    If keys can be moved, it depends on the distances between tokens only, not on where they begin.
    """

    def __init__(self, *, is_movable: bool) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._origin: int | None = None if is_movable else 0

    def add(self, ids: Sequence[int], start: int) -> str:
        """Add tokens at positions from `start` on; returns the digest of all tokens so far."""
        if self._origin is None:
            self._origin = start
        pairs = array("q", bytes(16 * len(ids)))
        pairs[0::2] = array("q", ids)
        first = start - self._origin
        pairs[1::2] = array("q", range(first, first + len(ids)))
        self._hash.update(pairs.tobytes())
        return self._hash.hexdigest()


class Recipes:
    """The recipes of all runs of a schema, the same for all its prompts.

    Attributes:
        of: by unit, the recipes of its runs.
        single: each run's recipe when it is encoded with its module, not with a scaffold.
    """

    def __init__(self, units: Units, *, is_compact: bool, is_movable: bool, room: int) -> None:
        """Make all recipes.

        Args:
            is_compact: prompts have no gaps. Scaffolds are then encoded without gaps, too, so that
                their KV is what full prefill would compute.
            is_movable: keys can be moved, so that only distances between tokens matter.
            room: how many positions the model has before its rotary frequencies change.
        """
        self._is_compact, self._is_movable, self._room = is_compact, is_movable, room
        self.single: dict[ModuleRun, Recipe] = {}
        self.of: dict[Unit, dict[ModuleRun, Recipe]] = {}
        for unit in units.single:
            self.of[unit] = self._recipes(unit)
            self.single |= self.of[unit]
        for unit in units.scaffolds:
            self.of[unit] = self._recipes(unit)

    def _recipes(self, unit: Unit) -> dict[ModuleRun, Recipe]:
        trail, is_true = Trail(is_movable=self._is_movable), True
        names = []
        found: dict[ModuleRun, Recipe] = {}
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

    def positions(self, unit: Unit) -> dict[ModuleRun, int]:
        """First position of each run of a unit and its context, while the unit is encoded."""
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
