"""Chooses how a prompt is prefilled: by the method that was asked for, or by another one.

Another one is taken where the model cannot run `auto`'s; the loading controller may change the
method's recompute ratio. Knows plans and methods; computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig
from cached_rag.engine.profile import Controller, profile_of
from cached_rag.errors import ConfigError, ContextOverflowError, ModelError, RelocationError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.library.plan import Plan
from cached_rag.methods import Epic, Full, Lexical, Prefix, Selector, Takes, UnionSelector, spelled

# First tokens of each chunk that `auto` and `fast` repair where nothing can be watched: as many as
# elsewhere. What the question's attention chooses there, its words do here (docs/llama_cpp.md).
_ANCHORS = Epic(8)


@dataclass(frozen=True)
class Choice:
    """How a prompt will be prefilled.

    Attributes:
        plan: only what the method uses of the original plan.
        method: the one to use.
        notes: sentences for the user, one for each thing that differs from what was asked for.
        decision: the loading controller's, in words; empty if it was not asked.
    """

    plan: Plan
    method: Selector
    notes: tuple[str, ...] = ()
    decision: str = ""


def choose(model: Backend, plan: Plan, config: GenerationConfig) -> Choice:
    """The method and plan for a prompt, after checking what the model can do.

    Raises:
        RelocationError: the model cannot run a method that was asked for by name.
        ModelError: repair cannot follow an answer of this model.
    """
    choice = _allowed(model, plan, config)
    return _adapted(model, choice) if config.adaptive else choice


def _allowed(model: Backend, plan: Plan, config: GenerationConfig) -> Choice:
    method, notes = config.selector(), []
    rule = model.rule
    if method.composes:
        if model.composer is None:
            raise RelocationError(
                f"{method.name!r} composes the states of recurrent layers, and this model has none "
                'that can be; use method="auto"'
            )
        rule, plan = model.composer.rule, plan.composed
    elif model.keeps_states:
        plan = plan.taking(Takes.NOTHING)
    try:
        for place in plan.placements:
            rule.check(plan.delta(place), plan.length)
        if model.keeps_states and method.takes is Takes.ALL:
            rule.check(1, plan.length)  # else no chunk can be reused by itself
    except RelocationError as error:
        if not method.gives_way:
            raise
        notes.append(str(error))
        switched = model.rule.limit is not None and plan.length > model.rule.limit
        method = Full() if switched else Prefix()
        plan = plan.taking(method.takes)
    if method.gives_way and not model.can_watch:
        method = _unwatched(method, config.recompute_ratio)
        notes.append(
            f"this model's attention cannot be watched, so {spelled(method)} is used instead, "
            'which keeps fewer of full prefill\'s answers; quality="exact" keeps them all'
        )
    if method.follow_tokens and not model.can_watch:
        raise ModelError(
            "this model's attention cannot be watched, so repair cannot follow an answer; leave "
            "out follow_tokens"
        )
    limit = model.rule.limit
    if limit is not None and plan.length <= limit < plan.length + config.max_tokens:
        notes.append(
            f"this model's rotation changes at {limit} tokens; what an answer has beyond them is "
            "not what transformers would say, which computes all before it anew"
        )
    return Choice(plan, method, tuple(notes))


def _unwatched(method: Selector, ratio: float | None) -> Selector:
    """What replaces a method that gives way, on models whose attention cannot be watched."""
    if ratio is None:  # more than its default keeps no more answers (docs/experiments.md)
        ratio = min(getattr(method, "recompute_ratio", 0.0), Lexical.recompute_ratio)
    return UnionSelector(members=(_ANCHORS, Lexical(ratio)))


def _adapted(model: Backend, choice: Choice) -> Choice:
    """The choice as the loading controller changes it."""
    plan, method = choice.plan, choice.method
    floor = getattr(method, "recompute_ratio", None)
    if floor is None or isinstance(method, UnionSelector):  # `auto` gave way to one without a ratio
        return choice
    found = plan.placements
    decision = Controller(profile_of(model), floor).decide(
        [(p.begin, p.kv.seq_len, "memory" if isinstance(p.kv, ModuleKV) else "disk") for p in found]
    )
    kept = tuple(
        place for place, is_loaded in zip(found, decision.loaded, strict=True) if is_loaded
    )
    chosen: Any = method
    method = replace(chosen, recompute_ratio=decision.recompute_ratio)
    return Choice(replace(plan, placements=kept), method, choice.notes, decision.reason)


def repair_mark(method: Selector) -> str:
    """The mark of KV that this method repairs; empty if its KV is what full prefill computes."""
    is_exact = method.takes is not Takes.ALL or getattr(method, "recompute_ratio", None) == 1.0
    return "" if is_exact else repr(method)


def check_fits(model: Backend, prompt_tokens: int, plan: Plan, max_tokens: int) -> None:
    """Check that prompt and answer fit the model's context.

    Raises:
        ConfigError: the prompt is empty.
        ContextOverflowError: they do not fit.
    """
    if not prompt_tokens:
        raise ConfigError("the prompt is empty; there is nothing to answer")
    room = model.context_length
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
