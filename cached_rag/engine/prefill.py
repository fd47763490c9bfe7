"""One prompt, from its text to the logits of its first answer token.

`read`, `prepare` and `complete` are the main flow; their numbered steps are the library in one
screen. Knows no generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cached_rag.backends.base import Backend, Prefilled
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokenization, Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.controller import Controller
from cached_rag.engine.decoding import Prefill
from cached_rag.engine.planner import Planner, Reading
from cached_rag.engine.profile import profile_of
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import (
    ConfigError,
    ContextOverflowError,
    CorruptBlobError,
    RelocationError,
    StoreError,
)
from cached_rag.kv.buffer import KVBuffer, Workspace
from cached_rag.kv.loader import LayerLoader
from cached_rag.kv.module import ModuleKV
from cached_rag.library.learning import Leftovers
from cached_rag.library.library import Library
from cached_rag.library.plan import Placement, Plan
from cached_rag.library.sequences import EXACT
from cached_rag.methods import CacheBlend, Full, Prefix, Reuse, Selector, Takes, name_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Read:
    """A prompt whose tokens and modules are known.

    Attributes:
        ms: milliseconds that took.
    """

    reading: Reading
    ms: float


@dataclass(frozen=True)
class Prepared:
    """A prompt before its prefill.

    Attributes:
        is_over: to be called when its answer is complete, or given up.
        plan: without what earlier prompts left.
        selector: the method, after what the model allows.
        exact_length: tokens from the first whose KV is what full prefill computes.
    """

    read: Read
    config: GenerationConfig
    report: Report
    is_over: Callable[[], None]
    tokens: Tokens
    plan: Plan
    selector: Selector
    exact_length: int


class Prefiller:
    """Prefills prompts on one model from one library, one at a time."""

    def __init__(
        self,
        model: Backend,
        library: Library,
        tokenization: Tokenization,
        leftovers: Leftovers,
        workspace: Workspace,
    ) -> None:
        self.model, self.library, self.tokenization = model, library, tokenization
        self._leftovers, self._lock, self.workspace = leftovers, model.lock, workspace

    def prefill(self, planner: Planner, config: GenerationConfig) -> Prefill:
        """See `Engine.prefill`."""
        read = self.read(planner, config)
        return on_model_thread(lambda: self.complete(self.prepare(read, config)))

    def read(self, planner: Planner, config: GenerationConfig) -> Read:
        """Find a prompt's tokens, as plain generation would have them, and the modules in it.

        Takes as long as the prompt is long, so it belongs on the thread of whoever asks: no model
        is needed, and no lock is held.

        Raises:
            ContextOverflowError: by its length alone the prompt cannot fit.
        """
        clock = Clock()
        room = self.model.context_length - config.max_tokens
        if (least := self.tokenization.least_tokens(planner.text, room)) is not None:
            raise ContextOverflowError(
                f"a prompt of {len(planner.text)} characters has {least} tokens at least; with an "
                f"answer of up to {config.max_tokens} it exceeds the model's context of "
                f"{self.model.context_length}; retrieve fewer or smaller chunks, or lower "
                "max_tokens"
            )
        self.library.refresh()
        return Read(planner.read(config.selector().takes), clock.total())

    def prepare(self, read: Read, config: GenerationConfig) -> Prepared:
        """What there is to do for a prompt; nothing is computed. Errors as `Engine.generate`.

        Until it is completed or given up (`is_over`), the prompt counts as under way.
        """
        is_over = self._leftovers.activity.begin()
        try:
            return self._prepare(read, config, is_over)
        except BaseException:
            is_over()
            raise

    def _prepare(
        self, read: Read, config: GenerationConfig, is_over: Callable[[], None]
    ) -> Prepared:
        report = Report(config.method_name)
        with self._lock, torch.inference_mode():
            # 1) Which tokens come from which module.
            clock = Clock()
            lazy = config.adaptive or self.library.is_pipelined
            tokens, plan = read.reading(report, lazy=lazy)
            report.prompt_tokens = len(tokens)
            self._check_fits(len(tokens), plan, config.max_tokens)
            report.match_ms = read.ms + clock.lap() - report.load_ms
            plan, selector = self._allowed(plan, config, report)
            if config.adaptive:
                plan, selector = self._adapted(plan, selector, report)
        exact = _exact_length(plan, is_lossy=self._is_lossy)
        return Prepared(read, config, report, is_over, tokens, plan, selector, exact)

    @property
    def _is_lossy(self) -> bool:
        """Whether KV that was computed exactly may come back a little changed."""
        return self.library.disk is not None and self.library.disk.codec.name != "raw"

    def complete(self, prepared: Prepared, behind: Sequence[ModuleKV] = ()) -> Prefill:
        """Compute what has no KV, up to the logits of the first answer token.

        Args:
            behind: exact KV of the prompt's beginning, in pieces.
        """
        try:
            return self._complete(prepared, behind)
        except BaseException:
            prepared.is_over()
            raise

    def _complete(self, prepared: Prepared, behind: Sequence[ModuleKV]) -> Prefill:
        config, report, tokens = prepared.config, prepared.report, prepared.tokens
        with self._lock, torch.inference_mode():
            # 2) Cached KV at its positions, in one buffer.
            clock = Clock()
            kind = _kind(report.method, prepared.selector)
            seen, is_exact = self._leftovers.seen(kind, tokens, prepared.plan)
            is_live = _tokens_in(behind) >= _tokens_in(seen)
            plan = prepared.plan.behind(behind if is_live else seen, are_modules=not is_live)
            hit = prepared.plan.num_modules if is_live else plan.num_modules
            buffer = self.workspace.take(len(tokens) + config.max_tokens)
            buffer.lay_out(plan.positions)
            loader = self._place(plan, buffer)
            # 3) The rows that have no KV, and those that the method repairs.
            try:
                done = self._compute(tokens, plan, prepared.selector, buffer, report, loader)
            except StoreError as error:
                assert loader is not None
                read, done = prepared.read, None
                if not self._drop(loader.failed, error, report):
                    config = config.replace(method="full")
                    whole = Plan((), (), len(tokens))
                    read = Read(lambda *_, **__: (tokens, whole), prepared.read.ms)
            finally:
                if loader is not None:
                    loader.finish()
            report.modules_hit = hit
            report.fuse_ms = clock.lap()
        if done is None:  # with what was damaged gone, or without any of it, once more
            notes = report.notes
            again = self._prepare(read, config, prepared.is_over)
            again.report.notes[:] = dict.fromkeys([*notes, *again.report.notes])
            return self._complete(again, ())

        return Prefill(
            tokens,
            done.logits,
            buffer,
            report,
            # Never under the model's lock: others may be at work, and the collector may call it.
            partial(self._leftovers.remember, kind, tokens, plan, buffer),
            partial(self.workspace.give, buffer),
            prepared.is_over,
            done.rows,
            _as_they_are(plan, prepared.selector),
            prepared.exact_length if is_live or is_exact or not seen else 0,
        )

    def has_forgotten(self, prepared: Prepared) -> bool:
        """Whether some module of a prompt is none any more."""
        return bool(self._leftovers.forgotten(prepared.plan))

    def remember(self, prepared: Prepared) -> None:
        """When a prompt that was not completed here is over: see to the modules it missed."""
        self._leftovers.see_to(prepared.tokens, prepared.plan)

    def _adapted(self, plan: Plan, selector: Selector, report: Report) -> tuple[Plan, Selector]:
        """Plan and method as the loading controller wants them."""
        floor = getattr(selector, "recompute_ratio", None)
        if floor is None:  # `auto` on a model that cannot have its method
            return plan, selector
        placements = plan.placements
        decision = Controller(profile_of(self.model), floor).decide(
            [
                (p.begin, p.kv.seq_len, "memory" if isinstance(p.kv, ModuleKV) else "disk")
                for p in placements
            ]
        )
        report.decision = decision.reason
        kept = [p for p, is_loaded in zip(placements, decision.loaded, strict=True) if is_loaded]
        chosen: Any = selector
        ratio = decision.recompute_ratio
        return replace(plan, placements=tuple(kept)), replace(chosen, recompute_ratio=ratio)

    def _place(self, plan: Plan, buffer: KVBuffer) -> LayerLoader | None:
        """Put cached KV where it belongs, at once if it is at hand, else while layers run."""
        is_at_hand = all(isinstance(place.kv, ModuleKV) for place in plan.placements)
        if not is_at_hand or (plan.placements and self.model.shapes.device.type == "cuda"):
            return LayerLoader(buffer, plan.placements, self.model.rule)
        for place in plan.placements:
            buffer.place(place.kv, place.begin, self.model.rule)
        return None

    def _drop(self, failed: Any, error: StoreError, report: Report) -> bool:
        """Forget a module's KV that turned out to be damaged while it was read; says if it is gone.

        What only cannot be read now is kept.
        """
        _log.warning("%s The module is computed anew.", error)
        report.notes.append(str(error))
        if failed is None or failed.source is None:
            raise error
        if isinstance(error, CorruptBlobError):
            with self.library.spared():
                self.library.store.delete(self.library.key(*failed.source))
                return True
        return False

    def _allowed(
        self, plan: Plan, config: GenerationConfig, report: Report
    ) -> tuple[Plan, Selector]:
        """The plan, cut to what the model can do if the method was left to us.

        Raises:
            RelocationError: it cannot do what was asked for by name.
        """
        selector = config.selector()
        rule = self.model.rule
        try:
            for place in plan.placements:
                rule.check(plan.delta(place), plan.length)
        except RelocationError as error:
            if not selector.gives_way:
                raise
            report.notes.append(str(error))
            switched = rule.limit is not None and plan.length > rule.limit
            selector = Full() if switched else Prefix()
            plan = plan.taking(selector.takes)
        if selector.gives_way and not self.model.can_watch:
            selector = CacheBlend()
            report.notes.append("this model's attention cannot be watched, so cacheblend is used")
        if selector != config.selector():
            report.method = name_of(selector)
        return plan, selector

    def _compute(
        self,
        tokens: Tokens,
        plan: Plan,
        selector: Selector,
        buffer: KVBuffer,
        report: Report,
        loader: LayerLoader | None,
    ) -> Prefilled:
        ids = torch.tensor([tokens.ids])
        layout = plan.layout(self.model.shapes.num_layers)
        cached = int((~layout.live).sum())
        if not cached:
            done = self.model.prefill(buffer, ids)
        else:
            ready = loader.wait if loader else None
            done = self.model.repair(buffer, ids, layout, selector, ready)
        report.charged_recompute = done.computed / (len(tokens) * self.model.shapes.num_layers)
        report.recomputed_tokens = int((~layout.live[done.rows.cpu()]).sum())
        report.cached_tokens = cached - report.recomputed_tokens
        return done

    def _check_fits(self, prompt_tokens: int, plan: Plan, max_tokens: int) -> None:
        if not prompt_tokens:
            raise ConfigError("the prompt is empty; there is nothing to answer")
        room = self.model.context_length
        if plan.length + max_tokens <= room:
            return
        if plan.length > prompt_tokens:
            raise ContextOverflowError(
                f"a prompt that reaches position {plan.length} of its schema and an answer of up "
                f"to {max_tokens} tokens exceed the model's context of {room}; use "
                'layout="compact", unions, or a smaller max_tokens'
            )
        raise ContextOverflowError(
            f"a prompt of {prompt_tokens} tokens and an answer of up to {max_tokens} "
            f"exceed the model's context of {room}; retrieve fewer or smaller chunks, or lower "
            "max_tokens"
        )


def _as_they_are(plan: Plan, selector: Selector) -> tuple[Placement, ...]:
    """Placements whose KV is in memory and the same in the prompt: exact, or not repaired."""
    is_repaired = not isinstance(selector, Reuse)
    return tuple(
        place
        for place in plan.placements
        if isinstance(place.kv, ModuleKV) and (place.is_exact or not is_repaired)
    )


def _exact_length(plan: Plan, *, is_lossy: bool) -> int:
    """Tokens from the first whose KV is, or will be, what full prefill computes."""
    inexact = [place.begin for place in plan.placements if is_lossy or not place.is_exact]
    return min(inexact, default=plan.num_tokens)


def _tokens_in(pieces: Sequence[ModuleKV]) -> int:
    return sum(kv.seq_len for kv in pieces)


def _kind(method: str, selector: Selector) -> str:
    """What kind of KV a method leaves behind: exact, or repaired in its own way."""
    is_whole = getattr(selector, "recompute_ratio", None) == 1.0
    return EXACT if is_whole or selector.takes is not Takes.ALL else f"{method} {selector!r}"
