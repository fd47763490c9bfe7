"""Divides a schema into units that are encoded together, names each run's KV, and computes it.

A unit is the text directly in a module, without the modules inside it; or text that every prompt
has (an anonymous module: Prompt Cache, section 3.2.1). The paper encodes each unit by itself. But
some text stands before a unit in every prompt; encoded behind that text, its context, a unit's KV
is nearer to full prefill's. It costs nothing later, since only the unit's own KV is kept. Knows
layouts, a model and a library; knows no prompt.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import ContextOverflowError, StoreError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.fingerprint import digest
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.pml.layout import Ids, ModuleRun, SchemaLayout
from cached_rag.pml.nodes import Path, Scaffold

# The context of a unit: nothing, the text that the schema begins with, or all text before the unit
# that every prompt with it has.
BEHIND = ("nothing", "head", "schema")


@dataclass(frozen=True, eq=False)
class Unit:
    """Runs that are encoded together, parameters among them.

    Attributes:
        name: name of the module or scaffold; empty for text that every prompt has.
        runs: the unit's runs, in document order.
        context: runs whose KV stands before the unit while it is encoded.
        is_scaffold: the unit is several modules, with the text between them in every prompt that
            imports all of them.
    """

    name: str
    runs: tuple[ModuleRun, ...]
    context: tuple[ModuleRun, ...]
    is_scaffold: bool = False


def divide(scaffolds: Sequence[Scaffold], layout: SchemaLayout, behind: str) -> list[Unit]:
    """All units of a schema.

    Those that are no scaffolds come first, in document order, so a context has only runs of units
    before it. Then come those of scaffolds, those of most runs first.
    """
    own: dict[Path, list[ModuleRun]] = defaultdict(list)
    for run in layout.order:
        own[run.unit].append(run)
    order = {run: index for index, run in enumerate(layout.order)}
    head = tuple(takewhile(_is_in_all, layout.order))

    def unit(name: str, runs: Sequence[ModuleRun], *, is_scaffold: bool = False) -> Unit:
        context = runs[0].context if behind == "schema" else ()
        if behind == "head" and runs[0].before:
            context = head
        return Unit(name, tuple(runs), context, is_scaffold)

    groups = [list(runs) for is_text, runs in groupby(layout.order, _is_in_all) if is_text]
    groups += [runs for path, runs in own.items() if path and any(run.is_cached for run in runs)]
    groups.sort(key=lambda runs: order[runs[0]])
    single = [unit("/".join(runs[0].unit), runs) for runs in groups]
    held = [(scaffold.name, _held(scaffold, own, order)) for scaffold in scaffolds]
    joint = [unit(name, runs, is_scaffold=True) for name, runs in held if runs]
    return single + sorted(joint, key=lambda one: len(one.runs), reverse=True)


def _is_in_all(run: ModuleRun) -> bool:
    """Whether the run is text that every prompt has."""
    return not run.unit and not run.is_param


def _held(
    scaffold: Scaffold, own: Mapping[Path, list[ModuleRun]], order: Mapping[ModuleRun, int]
) -> list[ModuleRun]:
    """A scaffold's runs: its modules', and those between them in prompts that import all.

    There are none if its modules are empty.
    """
    held = [order[run] for path in scaffold.paths for run in own[path]]
    around = {path[:depth] for path in scaffold.paths for depth in range(len(path) + 1)}
    span = range(min(held), max(held) + 1) if held else ()
    every = sorted((run for path in around for run in own[path]), key=order.__getitem__)
    return [run for run in every if order[run] in span]


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


@dataclass
class Encoded:
    """The result of encoding.

    Attributes:
        units: the units that were encoded.
        tokens: how many tokens they have.
        kv: KV by `Recipe.source`: all of the units' KV if it was asked for, else only what the
            library could not keep.
        problem: why the library could not keep some KV; None if it kept all.
    """

    units: set[Unit] = field(default_factory=set)
    tokens: int = 0
    kv: dict[tuple[EncodedAfter, Ids], ModuleKV] = field(default_factory=dict)
    problem: StoreError | None = None


class RunEncoder:
    """Names the KV of a schema's runs, the same for all its prompts, and computes it.

    Attributes:
        of: by unit, the recipes of its runs; in the order of `divide`.
        single: each run's recipe when it is encoded with its module, not with a scaffold.
        scaffolds: the units of scaffolds, those of most runs first.
    """

    def __init__(
        self, model: Backend, library: Library, units: Sequence[Unit], *, is_compact: bool
    ) -> None:
        """Make all recipes.

        Args:
            is_compact: prompts have no gaps. Scaffolds are then encoded without gaps, too, so that
                their KV is what full prefill would compute.
        """
        self.library, self._model, self._is_compact = library, model, is_compact
        self.scaffolds = [unit for unit in units if unit.is_scaffold]
        self.single: dict[ModuleRun, Recipe] = {}
        self.of: dict[Unit, dict[ModuleRun, Recipe]] = {}
        for unit in units:
            self.of[unit] = self._recipes(unit)
            if not unit.is_scaffold:
                self.single |= self.of[unit]

    def _recipes(self, unit: Unit) -> dict[ModuleRun, Recipe]:
        trail, is_true = Trail(is_movable=self._model.rule.is_movable), True
        names = []
        found: dict[ModuleRun, Recipe] = {}
        at = self._positions(unit)
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

    def _positions(self, unit: Unit) -> dict[ModuleRun, int]:
        """First position of each run of a unit and its context, while the unit is encoded."""
        every = (*unit.context, *unit.runs)
        rule, room = self._model.rule, self._model.context_length
        is_beyond = unit.runs[-1].end > min(room, rule.limit or room)
        is_closed = is_beyond or (self._is_compact and unit.is_scaffold)
        if not (is_closed and rule.is_movable):
            return {run: run.start for run in every}
        found, position = {}, 0
        for run in every:
            found[run] = position
            position += run.length
        return found

    def holds(self, unit: Unit) -> bool:
        """Whether all runs of a unit have KV."""
        recipes = self.of[unit].values()
        return all(self.library.shelf.holds(*recipe.source) for recipe in recipes)

    def encode(self, unit: Unit, done: Encoded, *, at_hand: bool = False) -> None:
        """Compute the KV of a unit, and of its context where it has none, and keep it.

        Args:
            done: what was encoded before, to which this is added.
            at_hand: also add all the KV.

        Raises:
            ContextOverflowError: a unit's positions exceed the model's context.
            RelocationError: a unit reaches positions at which the model's frequencies change.
        """
        context = {run: self._context(run, done) for run in unit.context}
        computed = self._compute(unit, context)
        for run, recipe in self.of[unit].items():
            try:
                self.library.put(recipe.source[0], computed[run])
                is_kept = True
            except StoreError as error:
                done.problem, is_kept = error, False
            if at_hand or not is_kept:
                done.kv[recipe.source] = computed[run]
        done.units.add(unit)
        done.tokens += sum(run.length for run in unit.runs)

    def _context(self, run: ModuleRun, done: Encoded) -> ModuleKV:
        """KV of a run that a unit is encoded behind; computed first if there is none."""
        recipe = self.single[run]
        found = done.kv.get(recipe.source) or self.library.shelf.fetch(*recipe.source)
        if found is None:
            self.encode(recipe.unit, done, at_hand=True)
            found = done.kv[recipe.source]
        return found

    def _compute(self, unit: Unit, context: dict[ModuleRun, ModuleKV]) -> dict[ModuleRun, ModuleKV]:
        """KV of a unit's runs, computed in one forward pass over the KV of their context."""
        at = self._positions(unit)
        every = (*unit.context, *unit.runs)
        ids = [token for run in every for token in run.fill]
        positions = [at[run] + offset for run in every for offset in range(len(run.fill))]
        self._check_room(unit, positions[-1] + 1)
        buffer = KVBuffer.like(self._model.shapes, len(ids)).lay_out(positions)
        slot = 0
        for run, kv in context.items():
            self._model.rule.check(at[run] - kv.start, positions[-1] + 1)
            buffer.place(kv, slot, self._model.rule)
            slot += run.length
        slots = torch.arange(slot, len(ids))
        self._model.prefill(buffer, torch.tensor([ids]), slots, num_logits=0)
        found = {}
        for run in unit.runs:
            if run.is_cached:
                found[run] = buffer.read(slot, slot + run.length, run.ids)
            slot += len(run.fill)
        return found

    def _check_room(self, unit: Unit, length: int) -> None:
        self._model.rule.check(0, length)
        if length > self._model.context_length:
            raise ContextOverflowError(
                f"{unit.name or 'the schema itself'!r} reaches position {length}, beyond the "
                f"model's context of {self._model.context_length}; split it, or put modules that "
                "exclude each other into a <union>"
            )
