"""How a prompt is prefilled: the method that was asked for, or what the model and loading allow.

Knows plans and methods; computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig
from cached_rag.engine.controller import Controller
from cached_rag.engine.profile import profile_of
from cached_rag.errors import ConfigError, ContextOverflowError, RelocationError
from cached_rag.kv.module import ModuleKV
from cached_rag.library.plan import Plan
from cached_rag.methods import CacheBlend, Full, Prefix, Selector, Takes


@dataclass(frozen=True)
class Choice:
    """What to do with a prompt.

    Attributes:
        plan: cut to what the method uses.
        notes: what the user should know.
        decision: the loading controller's, in words; empty where it was not asked.
    """

    plan: Plan
    method: Selector
    notes: tuple[str, ...] = ()
    decision: str = ""


def choose(model: Backend, plan: Plan, config: GenerationConfig) -> Choice:
    """What the model can do of what was asked for.

    Raises:
        RelocationError: it cannot do what was asked for by name.
    """
    choice = _allowed(model, plan, config)
    return _adapted(model, choice) if config.adaptive else choice


def _allowed(model: Backend, plan: Plan, config: GenerationConfig) -> Choice:
    method, notes = config.selector(), []
    try:
        for place in plan.placements:
            model.rule.check(plan.delta(place), plan.length)
    except RelocationError as error:
        if not method.gives_way:
            raise
        notes.append(str(error))
        switched = model.rule.limit is not None and plan.length > model.rule.limit
        method = Full() if switched else Prefix()
        plan = plan.taking(method.takes)
    if method.gives_way and not model.can_watch:
        method = CacheBlend()
        notes.append("this model's attention cannot be watched, so cacheblend is used")
    return Choice(plan, method, tuple(notes))


def _adapted(model: Backend, choice: Choice) -> Choice:
    """As the loading controller wants it."""
    plan, method = choice.plan, choice.method
    floor = getattr(method, "recompute_ratio", None)
    if floor is None:  # `auto` on a model that cannot have its method
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
    """Marks KV that a method repaired in its own way; empty if it is what full prefill computes."""
    is_exact = method.takes is not Takes.ALL or getattr(method, "recompute_ratio", None) == 1.0
    return "" if is_exact else repr(method)


def check_fits(model: Backend, prompt_tokens: int, plan: Plan, max_tokens: int) -> None:
    """Whether prompt and answer have room in the model's context.

    Raises:
        ConfigError: there is no prompt.
        ContextOverflowError: they have none.
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
