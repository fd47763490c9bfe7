"""Plans a prompt of ordinary text: its tokens, the chunks in it, where their KV comes from, and how
it is prefilled: by the method that was asked for, or by another one where the model cannot run it.

`pml/planner.py` plans prompts of a schema. Knows a library, a tokenizer and methods; computes
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cached_rag.backends.base import Backend
from cached_rag.backends.prompt_text import Rendered, Span, Spans, Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.resources import Resources
from cached_rag.errors import ConfigError, ContextOverflowError, RelocationError
from cached_rag.library.matching import Match, align
from cached_rag.library.plan import Encodings, Plan, make_plan
from cached_rag.methods import Auto, Full, Prefix, Selector, Takes, spelled

# A prompt that was read: its tokens and the chunks in it are known. Called on the model's thread,
# it gives the tokens, and which of them come from which KV. It takes a report, to which it gives
# the number of missed chunks and the time of loading; and `lazy`, whether KV on disk is only
# opened, and read when it is used.
Reading = Callable[..., tuple[Tokens, Plan]]


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
    """Plans one rendered prompt."""

    resources: Resources
    rendered: Rendered

    @property
    def text(self) -> str:
        """See `Planner`."""
        return self.rendered.text

    def read(self, takes: Takes) -> Reading:
        """See `Planner`."""
        resources, text, looks_for_kv = self.resources, self.text, takes is not Takes.NOTHING
        table, handed = resources.library.table, resources.library.handed_over
        matches = self._matches()
        rendered = replace(self.rendered, literal=self._literal(matches))
        tokens = resources.tokenization.tokenize(rendered)
        if looks_for_kv and resources.learning.notice(text, tokens, matches):
            matches = self._matches()
        whole = [match for one in matches if (match := align(one, tokens)) is not None]
        has_strays = len(whole) < len(matches)
        found, notes = handed.find(table, text, tokens, matches, whole, tells=looks_for_kv)
        aligned = tuple(found)
        clock = Clock()
        if looks_for_kv:
            notes = [*notes, *self._bring(tokens, aligned)]
        brought_ms = clock.total()

        def reading(report: Report, *, lazy: bool) -> tuple[Tokens, Plan]:
            report.note(*notes)
            if looks_for_kv:
                plan = self._plan(tokens, aligned, takes, report, lazy=lazy)
                report.load_ms += brought_ms
            else:
                chunks = tuple((match.chunk.text_digest, match.end) for match in aligned)
                plan = Plan((), aligned, len(tokens), chunks, looks_for_kv=False)
            return tokens, replace(plan, has_strays=has_strays)

        return reading

    def _literal(self, matches: Sequence[Match]) -> tuple[Span, ...]:
        """The spans of the prompt in which nothing is a control token."""
        rendered, obeyed = self.rendered, self.resources.tokenization.obeyed
        literal = (*rendered.literal, *(match.span for match in matches))
        if rendered.is_chat or not obeyed(replace(rendered, literal=literal)):
            return literal
        # A known text may begin within another one, whose KV is taken.
        others = self.resources.library.table.find(rendered.text, overlapping=True)
        return (*literal, *(match.span for match in others))

    def _matches(self) -> list[Match]:
        """The chunks in the prompt, but for those that touch the chat template's control tokens.

        Such a text was made to look like a piece of the template. What a template writes is obeyed,
        and is no document, wherever the same characters were ingested.
        """
        rendered = self.rendered
        matches = list(self.resources.library.table.find(rendered.text))
        if not matches or not rendered.is_chat:
            return matches
        own = Spans(self.resources.tokenization.obeyed(rendered))
        return [one for one in matches if not own.touch(*one.span)]

    def _bring(self, tokens: Tokens, matches: Sequence[Match]) -> list[str]:
        """Bring KV from another machine into memory; returns notes for the user."""
        library = self.resources.library
        if library.shelf.remote is None:
            return []
        notes = library.listen()
        encodings = Encodings.of(self.resources.encoder, tuple(tokens.ids))
        return [*notes, *library.shelf.bring(encodings.wanted(matches))]

    def _plan(
        self,
        tokens: Tokens,
        matches: Sequence[Match],
        takes: Takes,
        report: Report,
        *,
        lazy: bool,
    ) -> Plan:
        """The plan, with what the method takes; the report is given counts and times."""
        clock, resources = Clock(), self.resources
        kept = resources.shared.sequences if resources.settings.harvests else None
        plan = make_plan(resources.encoder, tokens, matches, kept, lazy=lazy)
        report.load_ms = clock.lap()
        unused = () if takes is Takes.ALL else plan.harvested
        missed = {match.chunk.text_digest: match.chunk for match in (*plan.missed, *unused)}
        report.modules_missed = len(missed)
        if resources.learning.write_back is not None:
            report.missed_tokens = sum(chunk.num_tokens for chunk in missed.values())
        if plan.missed:
            self._explain(plan, report)
        return plan.taking(takes)

    def _explain(self, plan: Plan, report: Report) -> None:
        """Add a note if the missing KV exists, but was made by another model or dtype."""
        library = self.resources.library
        makers = library.other_makers(match.chunk for match in plan.missed)
        if not makers:
            return
        own = library.maker
        alike = {str(own): f"{own} (other weights)"}
        by = ", ".join(dict.fromkeys(alike.get(str(maker), str(maker)) for maker in makers))
        later = ", and encoded in the background" if report.missed_tokens else ""
        report.note(
            f"KV of texts in this prompt was made by {by}; "
            f"this engine is {own}: {len(plan.missed)} texts are computed now{later}; `cached-rag "
            "ingest`, or `encode`, encodes all ahead"
        )


def choose(
    model: Backend, plan: Plan, config: GenerationConfig, report: Report
) -> tuple[Plan, Selector]:
    """How a prompt will be prefilled, after checking what the model can do.

    Args:
        report: is given a sentence for each thing that differs from what was asked for.

    Returns:
        Only what the method uses of the plan; and the method.

    Raises:
        RelocationError: the model cannot run a method that was asked for by name.
        ConfigError: repair cannot follow an answer of this model.
    """
    method, rule = config.selector(), model.rule
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
        if method.takes is Takes.ALL and not isinstance(method, Auto):
            raise
        report.note(str(error))
        switched = model.rule.limit is not None and plan.length > model.rule.limit
        method = Full() if switched else Prefix()
        plan = plan.taking(method.takes)
    if isinstance(method, Auto) and not model.can_watch:
        method = method.unwatched()
        report.note(
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
        report.note(
            f"this model's rotation changes at {limit} tokens; what an answer has beyond them is "
            "not what transformers would say, which computes all before it anew"
        )
    return plan, method


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
