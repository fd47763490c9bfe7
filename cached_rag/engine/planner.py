"""Plans a prompt of ordinary text: its tokens, the chunks in it, where their KV comes from, and how
it is prefilled: by the method that was asked for, or by another one where the model cannot run it.

`pml/planner.py` plans prompts of a schema. Knows a library, a tokenizer and methods; computes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cached_rag.backends.base import Backend
from cached_rag.backends.prompt_text import Rendered, Span, Spans, Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import ConfigError, ContextOverflowError, RelocationError
from cached_rag.library.encoder import Encoder
from cached_rag.library.learning import Learning
from cached_rag.library.library import Library
from cached_rag.library.matching import Match, align
from cached_rag.library.plan import Encodings, Plan, make_plan
from cached_rag.library.sequences import Sequences
from cached_rag.methods import Epic, Full, Lexical, Prefix, Selector, Takes, UnionSelector, spelled


class Reading(Protocol):
    """A prompt that was read: its tokens and the chunks in it are known."""

    def __call__(self, report: Report, *, lazy: bool) -> tuple[Tokens, Plan]:
        """Its tokens, and which of them come from which KV. On the model's thread.

        Args:
            report: is given the number of missed chunks, and the time of loading.
            lazy: KV on disk is only opened, and read when it is used.
        """


class Planner(Protocol):
    """A prompt that is to be answered."""

    @property
    def text(self) -> str:
        """The prompt as text. Its length says how much there is to read."""

    def read(self, takes: Takes) -> Reading:
        """Tokenise the prompt and find chunks in it. On any thread: it needs no model.

        Args:
            takes: what KV the method uses. For `Takes.NOTHING` chunks are found, as what spells
                control tokens in them is text, and their deletion concerns the prompt; no KV is
                looked for.
        """


@dataclass(frozen=True)
class TextPlanner:
    """Plans one rendered prompt.

    Attributes:
        kept: finished prompts, of which chunks without KV are taken; None to take none.
    """

    encoder: Encoder
    learning: Learning
    rendered: Rendered
    kept: Sequences | None = None

    @property
    def library(self) -> Library:
        """The known chunks."""
        return self.encoder.library

    @property
    def text(self) -> str:
        """See `Planner`."""
        return self.rendered.text

    def read(self, takes: Takes) -> Reading:
        """See `Planner`."""
        rendered, takes_any = self.rendered, takes is not Takes.NOTHING
        matches = self._matches()
        tokens = self.encoder.tokenization.tokenize(
            replace(rendered, literal=self._literal(matches))
        )
        if takes_any and self.learning.notice(rendered.text, tokens, matches):
            matches = self._matches()
        table, handed = self.library.table, self.library.handed_over
        whole = [match for one in matches if (match := align(one, tokens)) is not None]
        has_strays = len(whole) < len(matches)
        aligned, notes = handed.find(table, rendered.text, tokens, matches, whole, tells=takes_any)
        if not takes_any:
            chunks = tuple((match.chunk.text_digest, match.end) for match in aligned)
            none = Plan(
                (), tuple(aligned), len(tokens), chunks, looks_for_kv=False, has_strays=has_strays
            )
            return lambda report, *, lazy: (tokens, none)
        clock = Clock()
        notes = [*notes, *self._bring(tokens, aligned)]
        planned = partial(self._plan, tokens, aligned, notes, clock.total())

        def reading(report: Report, *, lazy: bool) -> tuple[Tokens, Plan]:
            plan = planned(report, takes, lazy=lazy)
            return tokens, replace(plan, has_strays=has_strays)

        return reading

    def _literal(self, matches: Sequence[Match]) -> tuple[Span, ...]:
        """The spans of the prompt in which nothing is a control token."""
        rendered = self.rendered
        literal = (*rendered.literal, *(match.span for match in matches))
        obeyed = self.encoder.tokenization.obeyed
        if rendered.is_chat or not obeyed(replace(rendered, literal=literal)):
            return literal
        # A known text may begin within another one, whose KV is taken.
        others = self.library.table.find(rendered.text, overlapping=True)
        return (*literal, *(match.span for match in others))

    def _matches(self) -> list[Match]:
        """The chunks in the prompt, but for those that touch the chat template's control tokens.

        Such a text was made to look like a piece of the template. What a template writes is obeyed,
        and is no document, wherever the same characters were ingested.
        """
        rendered = self.rendered
        matches = list(self.library.table.find(rendered.text))
        if not matches or not rendered.is_chat:
            return matches
        own = Spans(self.encoder.tokenization.obeyed(rendered))
        return [one for one in matches if not own.touch(*one.span)]

    def _bring(self, tokens: Tokens, matches: Sequence[Match]) -> list[str]:
        """Bring KV from another machine into memory; returns notes for the user."""
        if self.library.shelf.remote is None:
            return []
        notes = self.library.listen()
        encodings = Encodings.of(self.encoder, tuple(tokens.ids))
        return [*notes, *self.library.shelf.bring(encodings.wanted(matches))]

    def _plan(
        self,
        tokens: Tokens,
        matches: Sequence[Match],
        notes: Sequence[str],
        brought_ms: float,
        report: Report,
        takes: Takes,
        *,
        lazy: bool,
    ) -> Plan:
        clock = Clock()
        plan = make_plan(self.encoder, tokens, matches, self.kept, lazy=lazy)
        report.load_ms = brought_ms + clock.lap()
        report.notes += [note for note in notes if note not in report.notes]
        unused = () if takes is Takes.ALL else plan.harvested
        missed = {match.chunk.text_digest: match.chunk for match in (*plan.missed, *unused)}
        report.modules_missed = len(missed)
        if plan.missed:
            self._explain(plan, report)
        if self.learning.write_back is not None:
            report.missed_tokens = sum(chunk.num_tokens for chunk in missed.values())
        return plan.taking(takes)

    def _explain(self, plan: Plan, report: Report) -> None:
        """Add a note if the missing KV exists, but was made by another model or dtype."""
        makers = self.library.other_makers(match.chunk for match in plan.missed)
        if not makers:
            return
        own = self.library.maker
        is_alike = any(str(maker) == str(own) for maker in makers)
        by = ", ".join(dict.fromkeys(map(str, makers)))
        later = "" if self.learning.write_back is None else ", and encoded in the background"
        report.notes.append(
            f"KV of texts in this prompt was made by {by}{' (other weights)' if is_alike else ''}; "
            f"this engine is {own}: {len(plan.missed)} texts are computed now{later}; `cached-rag "
            "ingest`, or `encode`, encodes all ahead"
        )


def choose(
    model: Backend, plan: Plan, config: GenerationConfig
) -> tuple[Plan, Selector, list[str]]:
    """How a prompt will be prefilled, after checking what the model can do.

    Returns:
        Only what the method uses of the plan; the method; and sentences for the user, one for each
        thing that differs from what was asked for.

    Raises:
        RelocationError: the model cannot run a method that was asked for by name.
        ConfigError: repair cannot follow an answer of this model.
    """
    method, notes = config.selector(), list[str]()
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
        if not method.gives_way and method.takes is Takes.ALL:
            raise
        notes.append(str(error))
        switched = model.rule.limit is not None and plan.length > model.rule.limit
        method = Full() if switched else Prefix()
        plan = plan.taking(method.takes)
    if method.gives_way and not model.can_watch:
        method = _unwatched(method)
        notes.append(
            f"this model's attention cannot be watched, so {spelled(method)} is used instead, "
            'which keeps fewer of full prefill\'s answers; quality="exact" keeps them all'
        )
    if method.follow_tokens and not model.can_watch:
        raise ConfigError(
            "this model's attention cannot be watched, so repair cannot follow an answer; leave "
            "out follow_tokens"
        )
    limit = model.rule.limit
    if limit is not None and plan.length <= limit < plan.length + config.max_tokens:
        notes.append(
            f"this model's rotation changes at {limit} tokens; what an answer has beyond them is "
            "not what transformers would say, which computes all before it anew"
        )
    return plan, method, notes


def _unwatched(method: Selector) -> Selector:
    """What replaces a method that gives way, on models whose attention cannot be watched.

    It has as many anchors, and the ratio, if one was asked for. What the question's attention
    chooses elsewhere, its words do here (docs/llama_cpp.md).
    """
    default = getattr(type(method), "recompute_ratio", 0.0)
    ratio = getattr(method, "recompute_ratio", default)
    if ratio == default:  # more than `Lexical`'s keeps no more answers (docs/experiments.md)
        ratio = min(ratio, Lexical.recompute_ratio)
    anchors = Epic(getattr(method, "anchor_tokens", 8))
    return UnionSelector(members=(anchors, Lexical(ratio)))


def repair_mark(method: Selector) -> str:
    """The mark of KV that this method repairs; empty if its KV is what full prefill computes."""
    is_exact = method.takes is not Takes.ALL or getattr(method, "recompute_ratio", None) == 1.0
    return "" if is_exact else repr(method)


def check_fits(model: Backend, plan: Plan, max_tokens: int) -> None:
    """Check that prompt and answer fit the model's context.

    Raises:
        ConfigError: the prompt is empty.
        ContextOverflowError: they do not fit.
    """
    prompt_tokens = plan.num_tokens
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
