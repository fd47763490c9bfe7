"""Plans which tokens of a schema's prompt come from which KV; encodes first what has no KV.

`library/plan.py` finds chunks in plain prompts; the prompts here name their modules themselves.
Knows no method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cached_rag.backends.base import Backend, exclusively
from cached_rag.backends.prompt_text import Tokens
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import RelocationError
from cached_rag.kv.buffer import LayerSource
from cached_rag.library.encode import EncodeSummary
from cached_rag.library.plan import Placement, Plan
from cached_rag.library.shelf import Origin
from cached_rag.methods import Takes
from cached_rag.pml.layout import ModuleRun, PromptPiece, SchemaLayout, starts_of
from cached_rag.pml.nodes import SchemaNode
from cached_rag.pml.prompt import Bit, new_text
from cached_rag.pml.units import Encoded, Recipe, RunEncoder, Trail, Unit, divide


@dataclass(frozen=True)
class SchemaPlanner:
    """Plans prompts of one schema on one model.

    Attributes:
        is_compact: prompts have no gaps.
    """

    model: Backend
    layout: SchemaLayout
    encoder: RunEncoder
    is_compact: bool

    @classmethod
    def of(cls, node: SchemaNode, engine: Engine, layout: str, behind: str) -> SchemaPlanner:
        """Lay out a schema on an engine.

        Args:
            layout, behind: as in `Schema`.

        Raises:
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        # The planner must not hold the engine: planners are kept by weak references to engines.
        model = engine.model
        is_compact = layout == "compact" or (layout == "auto" and model.rule.is_movable)
        laid_out = SchemaLayout(node, engine.tokenization)
        units = [] if model.keeps_states else divide(node.scaffolds, laid_out, behind)
        encoder = RunEncoder(model, engine.library, units, is_compact=is_compact)
        return cls(model, laid_out, encoder, is_compact)

    @property
    def units(self) -> list[Unit]:
        """All that can be encoded; nothing for models with states, to which prompts are text."""
        return list(self.encoder.of)

    def missing(self) -> list[Unit]:
        """The units of which some run has no KV."""
        return [unit for unit in self.units if not self.encoder.holds(unit)]

    def encode(self, progress: Callable[[str], object]) -> EncodeSummary:
        """See `Schema.encode`."""
        started, missing, done = time.perf_counter(), self.missing(), Encoded()

        for unit in missing:  # answers go on between units
            exclusively(self.model, partial(self.encoder.encode, unit, done))
            progress(unit.name)
        if done.problem is not None:
            raise done.problem
        present, seconds = len(self.units) - len(missing), time.perf_counter() - started
        return EncodeSummary(len(missing), present, (), done.tokens, seconds)

    def bring(self, pieces: Sequence[PromptPiece]) -> list[str]:
        """Bring the prompt's KV from another machine into memory; returns notes for the user."""
        wanted = [[recipe.source] for recipe in self._recipes(pieces).values()]
        return self.encoder.library.shelf.bring(wanted)

    def plan(
        self,
        pieces: Sequence[PromptPiece],
        takes: Takes,
        notes: Sequence[str],
        report: Report,
        *,
        lazy: bool,
    ) -> tuple[Tokens, Plan]:
        """A prompt's tokens, and the KV that each comes from. Encodes units that have no KV.

        Args:
            notes: for the report.

        Raises:
            ContextOverflowError: a module that has no KV stands beyond the model's context.
            RelocationError: new text moves a module to other positions, and the model's keys cannot
                be moved.
        """
        report.note(*notes)
        ids = [token for piece in pieces for token in piece.ids]
        tokens = Tokens(ids, [0] * len(ids), [0] * len(ids))
        if takes is Takes.NOTHING:
            return tokens, Plan((), (), len(ids))
        starts = starts_of(pieces, is_compact=self.is_compact)
        if not self.model.rule.is_movable:
            pieces = list(map(self._where_it_is, pieces, starts))
        placements = tuple(self._placements(pieces, starts, report, lazy=lazy))
        at = None
        if not self.is_compact:
            placed = zip(pieces, starts, strict=True)
            at = tuple(start + i for piece, start in placed for i in range(len(piece.ids)))
        return tokens, Plan(placements, (), len(ids), positions=at).taking(takes)

    def _placements(
        self, pieces: Sequence[PromptPiece], starts: Sequence[int], report: Report, *, lazy: bool
    ) -> Iterator[Placement]:
        recipes = self._recipes(pieces)
        clock = Clock()
        found = self._kv(recipes, report, lazy=lazy)
        report.load_ms = clock.lap()
        trail = Trail(is_movable=self.model.rule.is_movable)
        # The last token's logits are wanted, so it is always computed.
        begin, last, counted = 0, sum(len(piece.ids) for piece in pieces) - 1, set()
        for piece, start in zip(pieces, starts, strict=True):
            seen = trail.add(piece.ids, start)
            end = min(begin + len(piece.ids), last)
            run = piece.run
            if run is not None and run in found and end > begin:
                kv, origin = found[run]
                yield Placement(
                    begin,
                    kv.slice(0, end - begin),
                    is_exact=recipes[run].seen == seen,
                    is_chunk=bool(run.unit) and run.unit not in counted,
                    source=recipes[run].source,
                    origin=origin,
                    name="/".join(run.unit),
                )
                counted.add(run.unit)
            begin += len(piece.ids)

    def _kv(
        self, recipes: dict[ModuleRun, Recipe], report: Report, *, lazy: bool
    ) -> dict[ModuleRun, tuple[LayerSource, Origin]]:
        """The KV of runs, encoded now where there is none, and where it was."""
        found: dict[ModuleRun, tuple[LayerSource, Origin]] = {}
        for run, recipe in recipes.items():
            behind, ids = recipe.source
            best = self.encoder.library.shelf.best_encoding([behind], ids, lazy=lazy)
            if best is not None:
                found[run] = best[1:]
        done = Encoded()
        for run in recipes.keys() - found.keys():
            if recipes[run].unit not in done.units:
                self.encoder.encode(recipes[run].unit, done, at_hand=True)
            found[run] = done.kv[recipes[run].source], Origin("new")
        report.modules_missed = sum(bool(unit.name) for unit in done.units)
        report.missed_tokens = done.tokens
        if done.problem is not None:
            report.note(f"{done.problem} It is computed anew next time.")
        return found

    def _recipes(self, pieces: Sequence[PromptPiece]) -> dict[ModuleRun, Recipe]:
        """The recipe of each run's KV: a scaffold's, if the prompt has all runs of the scaffold."""
        there = {piece.run for piece in pieces if piece.run is not None}
        chosen = {run: self.encoder.single[run] for run in there if run.is_cached}
        held: set[ModuleRun] = set()
        for scaffold in self.encoder.scaffolds:
            own = self.encoder.of[scaffold]
            texts = {run for run in scaffold.runs if not run.is_param}
            if texts <= there and held.isdisjoint(own):
                chosen |= own
                held |= own.keys()
        return chosen

    def _where_it_is(self, piece: PromptPiece, start: int) -> PromptPiece:
        """A piece for a model whose keys cannot be moved.

        A part of the chat template at another position than the schema's becomes new text, which
        is computed.

        Raises:
            RelocationError: a module, or other text of the schema, is at another position.
        """
        run = piece.run
        if run is None or not run.is_cached or run.start == start:
            return piece
        if all(run is not own for _, own in self.layout.frames):
            what, remedy = "new text pushes", "Shorten the text, give it room with a <param>"
            if self.is_compact:
                what, remedy = "the compact layout moves", 'Take layout="schema"'
            raise RelocationError(
                f"{what} {'/'.join(run.unit) or 'the schema'!r} from position {run.start} to "
                f"{start}, and this model's keys cannot be moved: {self.model.rule.reason}. "
                f'{remedy}, or use method="full"'
            )
        return PromptPiece(piece.ids)


@dataclass(frozen=True)
class PromptPlanner:
    """Plans one prompt of a schema."""

    planner: SchemaPlanner
    bits: Sequence[Bit]

    @property
    def text(self) -> str:
        """The prompt's arguments and new text, which are not the schema's."""
        return new_text(self.bits)

    def read(self, takes: Takes) -> Callable[..., tuple[Tokens, Plan]]:
        """Tokenise the prompt; returns the rest of `SchemaPlanner.plan`, to be called later.

        That part runs in the model's thread, since it may encode units.

        Raises:
            PMLError: an argument has more tokens than its parameter admits.
        """
        pieces = self.planner.layout.pieces(self.bits)
        notes = [] if takes is Takes.NOTHING else self.planner.bring(pieces)
        return partial(self.planner.plan, pieces, takes, notes)
