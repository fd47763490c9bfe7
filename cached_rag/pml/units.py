"""Divides a schema into units that are encoded together, names each run's KV, and computes it.

A unit is the text directly in a module, without the modules inside it; or text that every prompt
has (an anonymous module: Prompt Cache, section 3.2.1). The paper encodes each unit by itself. But
some text stands before a unit in every prompt; encoded behind that text, its context, a unit's KV
is nearer to full prefill's. It costs nothing later, since only the unit's own KV is kept. Knows
layouts, a model and a library; knows no prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import ContextOverflowError, StoreError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.fingerprint import digest
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.pml.layout import Ids, ModuleRun, SchemaLayout
from cached_rag.pml.nodes import Message, Module, Node, Path, Scaffold, SchemaNode, Union

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


class Units:
    """All units of a schema.

    Attributes:
        single: units that are no scaffolds, in document order. A context has only runs of units
            before it.
        scaffolds: units of scaffolds, those of most runs first.
    """

    def __init__(self, schema: SchemaNode, layout: SchemaLayout, behind: str) -> None:
        self._layout, self._behind = layout, behind
        self._head = tuple(takewhile(lambda run: not run.unit and not run.is_param, layout.order))
        self._own: dict[Path, list[ModuleRun]] = defaultdict(list)
        for run in layout.order:
            self._own[run.unit].append(run)
        self._order = {run: index for index, run in enumerate(layout.order)}
        self._contexts: dict[Path, tuple[ModuleRun, ...]] = {}
        # Text outside modules that will be one unit, until something interrupts it; its context.
        self._text: list[ModuleRun] = []
        self._text_context: tuple[ModuleRun, ...] = ()
        self.single: list[Unit] = []
        self._schema(schema)
        found = [self._scaffold(scaffold) for scaffold in schema.scaffolds]
        self.scaffolds = [unit for unit in found if unit.runs]  # modules may be empty
        self.scaffolds.sort(key=lambda unit: len(unit.runs), reverse=True)

    def _schema(self, schema: SchemaNode) -> None:
        before: list[ModuleRun] = []
        if self._layout.begin is not None:
            self._run(self._layout.begin, before)
        self._nodes(schema.children, before)
        if self._layout.frames:
            self._run(self._layout.frames[-1], before)
        self._end_text()

    def _nodes(self, children: Sequence[Node], before: list[ModuleRun]) -> None:
        """Find units among nodes.

        Args:
            before: cached runs that every prompt with these nodes has before them; those of the
                nodes that every such prompt has are added.
        """
        for child in children:
            if isinstance(child, Module):
                self._nodes(child.children, [*before])
            elif isinstance(child, Union):
                self._nodes(child.children, before)
                before += self._stand_in(child)
            elif isinstance(child, Message):
                self._nodes(child.children, before)
            else:
                assert child.number is not None
                self._run(self._layout.texts[child.number], before)

    def _run(self, run: ModuleRun, before: list[ModuleRun]) -> None:
        if not run.length:
            return
        if run.unit or run.is_param:
            self._end_text()
            if run.unit and run.unit not in self._contexts:
                context = self._contexts[run.unit] = self._context(before)
                own = tuple(self._own[run.unit])
                if any(other.is_cached for other in own):
                    self.single.append(Unit("/".join(run.unit), own, context))
        else:
            if not self._text:
                self._text_context = self._context(before)
            self._text.append(run)
        if run.is_cached:
            before.append(run)

    def _end_text(self) -> None:
        if self._text:
            self.single.append(Unit("", tuple(self._text), self._text_context))
        self._text = []

    def _stand_in(self, union: Union) -> list[ModuleRun]:
        """Runs that stand for a union in the contexts after it: those of its stand-in module.

        A module with parameters cannot stand in, since its arguments are not known.
        """
        for module in union.children:
            if module.name == union.stand_in and not module.has_params:
                return [run for run in self._own[module.path] if run.is_cached]
        return []

    def _scaffold(self, scaffold: Scaffold) -> Unit:
        """A scaffold's unit: its modules, and the text between them in prompts that import all."""
        held = [self._order[run] for path in scaffold.paths for run in self._own[path]]
        around = {path[:depth] for path in scaffold.paths for depth in range(len(path) + 1)}
        span = range(min(held), max(held) + 1) if held else ()
        every = sorted(self._order[run] for path in around for run in self._own[path])
        runs = tuple(self._layout.order[index] for index in every if index in span)
        context = self._contexts[runs[0].unit] if runs else ()
        return Unit(scaffold.name, runs, context, is_scaffold=True)

    def _context(self, before: Sequence[ModuleRun]) -> tuple[ModuleRun, ...]:
        if self._behind == "schema":
            return tuple(before)
        return self._head if before and self._behind == "head" else ()


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


@dataclass(frozen=True)
class RunEncoder:
    """Encodes the units of one schema."""

    model: Backend
    library: Library
    recipes: Recipes

    def holds(self, unit: Unit) -> bool:
        """Whether all runs of a unit have KV."""
        recipes = self.recipes.of[unit].values()
        return all(self.library.shelf.holds(*recipe.source) for recipe in recipes)

    def encode(
        self, units: Iterable[Unit], *, at_hand: bool = False, done: Encoded | None = None
    ) -> Encoded:
        """Compute the KV of units, and keep it.

        Args:
            at_hand: also return all the KV.
            done: the result of earlier calls, to which this one adds its own.

        Raises:
            ContextOverflowError: a unit's positions exceed the model's context.
            RelocationError: a unit reaches positions at which the model's frequencies change.
        """
        done = done or Encoded()
        for unit in units:
            if unit not in done.units:
                self._encode(unit, done, at_hand=at_hand)
        return done

    def _encode(self, unit: Unit, done: Encoded, *, at_hand: bool) -> None:
        context = {run: self._context(run, done) for run in unit.context}
        computed = self._compute(unit, context)
        for run, recipe in self.recipes.of[unit].items():
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
        recipe = self.recipes.single[run]
        found = done.kv.get(recipe.source) or self.library.shelf.fetch(*recipe.source)
        if found is None:
            self._encode(recipe.unit, done, at_hand=True)
            found = done.kv[recipe.source]
        return found

    def _compute(self, unit: Unit, context: dict[ModuleRun, ModuleKV]) -> dict[ModuleRun, ModuleKV]:
        """KV of a unit's runs, computed in one forward pass over the KV of their context."""
        at = self.recipes.positions(unit)
        every = (*unit.context, *unit.runs)
        ids = [token for run in every for token in run.fill]
        positions = [at[run] + offset for run in every for offset in range(len(run.fill))]
        self._check_room(unit, positions[-1] + 1)
        buffer = KVBuffer.like(self.model.shapes, len(ids)).lay_out(positions)
        slot = 0
        for run, kv in context.items():
            self.model.rule.check(at[run] - kv.start, positions[-1] + 1)
            buffer.place(kv, slot, self.model.rule)
            slot += run.length
        slots = torch.arange(slot, len(ids))
        self.model.prefill(buffer, torch.tensor([ids]), slots, num_logits=0)
        found = {}
        for run in unit.runs:
            if run.is_cached:
                found[run] = buffer.read(slot, slot + run.length, run.ids)
            slot += len(run.fill)
        return found

    def _check_room(self, unit: Unit, length: int) -> None:
        self.model.rule.check(0, length)
        if length > self.model.context_length:
            raise ContextOverflowError(
                f"{unit.name or 'the schema itself'!r} reaches position {length}, beyond the "
                f"model's context of {self.model.context_length}; split it, or put modules that "
                "exclude each other into a <union>"
            )
