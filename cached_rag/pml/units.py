"""What of a schema is encoded together, and behind what. Knows layouts; knows no model and no KV.

A unit is a module's own text, without that of the modules inside it, or text that every prompt
has (an anonymous module, Prompt Cache, section 3.2.1). The paper encodes each by itself. A prompt
has more before it, some of it always: encoding a unit behind that costs nothing later, for only
its own slice is kept.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cached_rag.kv.fingerprint import digest
from cached_rag.pml.layout import Layout, Run
from cached_rag.pml.nodes import Path, Scaffold

# What units are encoded behind: nothing, what the schema begins with, or all that is always there.
BEHIND = ("nothing", "head", "schema")


@dataclass(frozen=True, eq=False)
class Unit:
    """Runs that are encoded together, parameters among them.

    Attributes:
        name: the module's, or the scaffold's; empty for text that every prompt has.
        runs: in document order.
        context: runs whose KV stands before them meanwhile.
        is_scaffold: several modules, and all that is between them in prompts that have all.
    """

    name: str
    runs: tuple[Run, ...]
    context: tuple[Run, ...]
    is_scaffold: bool = False


@dataclass(frozen=True)
class Recipe:
    """How one run's KV is made, as far as its identity needs it.

    Attributes:
        unit: encoding it gives the KV.
        name: differs wherever the KV would.
        seen: digest of the tokens and positions up to the run's end, if its KV is what prefill of
            exactly these would compute; else None.
    """

    unit: Unit
    name: str
    seen: str | None


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


def units_of(layout: Layout, behind: str) -> list[Unit]:
    """All that can be encoded of a schema by itself, in document order."""
    return [_unit(layout, behind, "/".join(runs[0].unit), runs) for runs in _groups(layout)]


def scaffold_unit(layout: Layout, behind: str, scaffold: Scaffold) -> Unit:
    """A scaffold's modules with all that stands between them in every such prompt."""
    held = [i for i, run in enumerate(layout.order) if run.unit in scaffold.paths]
    span = layout.order[held[0] : held[-1] + 1] if held else ()
    runs = [run for run in span if any(_is_around(run.unit, path) for path in scaffold.paths)]
    return replace(_unit(layout, behind, scaffold.name, tuple(runs)), is_scaffold=True)


def _groups(layout: Layout) -> Iterator[tuple[Run, ...]]:
    done: set[Path] = set()
    group: list[Run] = []
    for run in layout.order:
        if run.unit or run.is_param:
            if group:
                yield tuple(group)
            group = []
            if run.unit and run.unit not in done:
                done.add(run.unit)
                own = tuple(layout.own(run.unit))
                if any(r.is_cached for r in own):
                    yield own
        else:
            group.append(run)
    if group:
        yield tuple(group)


def _unit(layout: Layout, behind: str, name: str, runs: tuple[Run, ...]) -> Unit:
    if not runs or behind == "nothing":
        return Unit(name, runs, ())
    before = layout.order[: layout.order.index(runs[0])]
    if behind == "head":
        return Unit(name, runs, tuple(r for r in _head(layout) if r in before))
    path = runs[0].unit
    seen = [r for r in before if r not in runs and _is_before(layout, r.unit, path)]
    return Unit(name, runs, tuple(run for run in seen if run.is_cached))


def _is_before(layout: Layout, unit: Path, path: Path) -> bool:
    """Whether every prompt with the module `path` has what `unit` says, or has it stood in for.

    A stand-in belongs to a union of a module around `path`, and `path` to no child of that union.
    """
    if _is_around(unit, path):
        return True
    excluded = layout.stand_ins.get(unit)
    if excluded is None or not _is_around(unit[:-1], path):
        return False
    return not any(_is_around(other, path) for other in excluded)


def _head(layout: Layout) -> list[Run]:
    head: list[Run] = []
    for run in layout.order:
        if run.unit or run.is_param:
            break
        head.append(run)
    return head


def _is_around(unit: Path, path: Path) -> bool:
    """Whether a prompt with the module `path` has the texts of `unit`."""
    return path[: len(unit)] == unit


class Recipes:
    """The recipe of every run, whatever a prompt imports."""

    def __init__(
        self, units: Sequence[Unit], *, is_compact: bool, is_movable: bool, room: int
    ) -> None:
        """Settle all names.

        Args:
            is_compact: prompts have no gaps; a scaffold is encoded without them, too, so that it is
                what full prefill would compute.
            is_movable: keys can be moved, so that it matters not where, but how far apart tokens
                stand.
            room: positions that the model has, before its frequencies change.
        """
        self.units = units
        self._is_compact, self._is_movable, self._room = is_compact, is_movable, room
        self.single: dict[Run, Recipe] = {}
        self._by_unit: dict[Unit, dict[Run, Recipe]] = {}
        for unit in units:
            self.single |= self.of(unit)

    def of(self, unit: Unit) -> dict[Run, Recipe]:
        """The recipes of one unit's runs; those of its context must be known."""
        if unit not in self._by_unit:
            self._by_unit[unit] = self._of(unit)
        return self._by_unit[unit]

    def _of(self, unit: Unit) -> dict[Run, Recipe]:
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
                found[run] = Recipe(unit, digest(before, seen), seen if is_true else None)
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
