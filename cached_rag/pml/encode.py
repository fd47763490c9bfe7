"""Computes the KV of a schema's runs and keeps it in the library.

Knows a model and a library; knows no prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import ContextOverflowError, StoreError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.pml.layout import Ids, ModuleRun
from cached_rag.pml.units import Recipe, Recipes, Unit


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

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """The units of which some run has no KV."""
        return [unit for unit in units if not all(map(self._holds, self.recipes.of[unit].values()))]

    def _holds(self, recipe: Recipe) -> bool:
        return self.library.shelf.holds(*recipe.source)

    def encode(
        self,
        units: Iterable[Unit],
        *,
        at_hand: bool = False,
        done: Encoded | None = None,
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
