"""What became of a prompt, for people: as a page of HTML, in a notebook, or as plain text.

Everything that the template prints is escaped and made visible; documents are not trusted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from cached_rag.engine.report import Report
from cached_rag.engine.trace import Counts, Kind, Span, Trace, TracePart
from cached_rag.errors import ConfigError

MEANING = {
    Kind.IN_PLACE: "was read before at this place, behind the same text; its KV is used as it is",
    Kind.MOVED: "was read before behind other text; its KV is moved here and used as it is",
    Kind.IN_PART: "had KV; computed again in the first layers, and taken from it in all others",
    Kind.REPAIRED: "had KV; computed again in every layer",
    Kind.COMPUTED: "had no KV that this method uses; computed",
}
# Of chunks that were found in the index, and in the prompt by no known text.
NOT_KNOWN = (
    "read as ordinary text: shorter than 32 characters, without KV when it was asked, or the "
    "method takes none"
)
_TIERS = {
    "ahead": "disk, read ahead",
    "remote": "another machine",
    "kept": "an earlier prompt",
    "harvest": "an earlier prompt that contained it (harvest)",
    "new": "what was encoded for it just now",
}
# Most characters of a prompt that are shown, the fewest of each segment, and most segments.
_SHOWN, _LEAST, _MOST_SEGMENTS = 100_000, 400, 250
# Prompts, and texts between chunks, of so many characters are not folded; and how long names are.
_SHORT, _BRIEF, _EXCERPT = 4_000, 600, 60
_LEAST_MS = 0.05  # less is not worth a word


@dataclass(frozen=True)
class Stage:
    """A part of the time; `begin_ms` is when it began, from the call."""

    name: str
    begin_ms: float
    ms: float

    @property
    def said(self) -> str:
        """How long it took."""
        return f"{self.ms:.{1 if self.ms < 100 else 0}f} ms"


@dataclass(frozen=True)
class Segment:
    """A run of the prompt's text: one part's, or what stands between two.

    Attributes:
        name: the part's.
        pieces: texts of one kind each; behind them `left_out` characters are not shown, and then
            come the pieces of `tail`.
        is_short: it need not be folded.
    """

    name: str
    part: TracePart | None
    pieces: Sequence[tuple[Kind, str]]
    left_out: int
    tail: Sequence[tuple[Kind, str]]
    is_short: bool

    @property
    def is_blank(self) -> bool:
        """Whether all of it is white space."""
        return not any(text.strip() for _, text in (*self.pieces, *self.tail))


class Explained(Protocol):
    """An answer: a `Generation`, a `Stream` that has begun, or an `Answer`."""

    @property
    def report(self) -> Report:
        """Its figures."""

    @property
    def trace(self) -> Trace | None:
        """What became of its prompt; None if that is not known."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """What was reused, moved, repaired and computed of a prompt, and how long each part took.

    In a notebook it shows itself; `print` gives it as text, `save` as a page.

    Attributes:
        full: the report of the same prompt with full prefill, to compare with; None for none.
        names: what chunks are called, by the digests of their texts.
        title, text: the question and the answer, if they are to be shown.
    """

    trace: Trace
    report: Report
    full: Report | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    text: str = ""

    @classmethod
    def of(cls, answer: Explained, full: Explained | None = None, **shown: Any) -> Explanation:
        """Explain an answer.

        Args:
            full: the answer to the same prompt with `method="full"`, to compare with.
            shown: `names`, `title` and `text`.

        Raises:
            ConfigError: the prompt is not known: it was not prefilled, or the answer was put
                together by hand.
        """
        trace = answer.trace
        if trace is None:
            raise ConfigError(
                "nothing is known of this answer's prompt, so it cannot be explained; take an "
                "answer from `ask`, `stream` or `generate`, and from a stream a piece first"
            )
        return cls(trace, answer.report, full.report if full else None, **shown)

    def __str__(self) -> str:
        total = max(1, self.report.prompt_tokens)
        lines = [self.report.to_line(), "", "tokens"]
        for kind, count in self.trace.counts.items():
            if count:
                lines.append(f"  {kind.value:<9} {count:>6} {count / total:>4.0%}  {MEANING[kind]}")
        lines += ["", "parts of the prompt"]
        for name, part in zip(self.called, self.trace.parts, strict=True):
            lines += [f"  {name}", f"      {said(part)}"]
        lines += [f"  {name}\n      {NOT_KNOWN}" for name in self.unseen]
        lines += ["", "time", *_bars(stages(self.report))]
        if self.comparison:
            lines += ["", self.comparison]
        lines += [f"note: {note}" for note in self.report.notes]
        return visible("\n".join(lines))

    def __repr__(self) -> str:
        return f"<Explanation of {self.report.prompt_tokens} prompt tokens>"

    def _repr_html_(self) -> str:
        return page(self, is_whole=False)

    def html(self) -> str:
        """A whole page, which loads nothing from elsewhere and runs no script."""
        return page(self, is_whole=True)

    def save(self, path: str | Path) -> None:
        """Write the page to a file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the page cannot be written to {path}: {error.strerror or error}; make room, or "
                "name a file in a folder that is there"
            ) from error

    @cached_property
    def called(self) -> list[str]:
        """The name of each part of the trace, in its order."""
        first = {span.part: span for span in reversed(self.trace.spans)}
        return [self._name(part, first.get(at)) for at, part in enumerate(self.trace.parts)]

    @property
    def unseen(self) -> list[str]:
        """Names of chunks that no part of the prompt is known to be."""
        known = {part.digest for part in self.trace.parts}
        return [name for digest, name in self.names.items() if digest not in known]

    def _name(self, part: TracePart, first: Span | None) -> str:
        if part.digest in self.names:
            return self.names[part.digest]
        if part.digest and first is not None:
            excerpt = self.trace.text[first.begin : first.begin + _EXCERPT]
            return f"“{' '.join(excerpt.split())} …”"
        is_kept = part.origin is not None and part.origin.tier == "kept"
        return part.name or ("Said before" if is_kept else "The prompt's head")

    @property
    def comparison(self) -> str:
        """What full prefill took, or about would; empty if neither is known."""
        full, ttft, estimate = self.full, self.report.ttft_ms, self.trace.full_ms
        if full is not None and ttft:
            return (
                f"Full prefill, measured: first token after {full.ttft_ms:.0f} ms, "
                f"{full.ttft_ms / ttft:.1f} times as long."
            )
        if estimate is None or self.report.method == "full":
            return ""
        return (
            f"Computing all {self.report.prompt_tokens} tokens would take about {estimate:.0f} ms: "
            "an estimate, by the profile that was measured for this model on this machine."
        )

    def segments(self) -> Iterator[Segment]:
        """The prompt's text, as much of it as is shown."""
        groups = [list(group) for _, group in groupby(self.trace.spans, lambda span: span.part)]
        is_huge = len(self.trace.text) > _SHOWN
        most = max(_LEAST, _SHOWN // len(groups)) if is_huge else _SHOWN
        for spans in groups[:_MOST_SEGMENTS]:
            begin, end, at = spans[0].begin, spans[-1].end, spans[0].part
            left_out = max(0, end - begin - most)
            until = end if not left_out else begin + most * 3 // 4
            yield Segment(
                "" if at is None else self.called[at],
                None if at is None else self.trace.parts[at],
                self._pieces(spans, begin, until),
                left_out,
                self._pieces(spans, until + left_out, end),
                len(self.trace.text) < _SHORT or (at is None and end - begin < _BRIEF),
            )

    @property
    def segments_left_out(self) -> int:
        """How many segments are not shown."""
        return max(0, len(list(groupby(span.part for span in self.trace.spans))) - _MOST_SEGMENTS)

    def _pieces(self, spans: Sequence[Span], begin: int, end: int) -> list[tuple[Kind, str]]:
        text = self.trace.text
        cut = ((one.kind, text[max(one.begin, begin) : min(one.end, end)]) for one in spans)
        return [(kind, piece) for kind, piece in cut if piece]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON; spans name characters of the prompt."""
        trace, full = self.trace, self.full
        return {
            "counts": _plain(trace.counts),
            "parts": [
                {
                    **dataclasses.asdict(part),
                    "name": name,
                    "counts": _plain(part.counts),
                    "tokens": part.tokens,
                }
                for name, part in zip(self.called, trace.parts, strict=True)
            ],
            "stages": {stage.name: round(stage.ms, 3) for stage in stages(self.report)},
            "prompt": trace.text,
            "spans": [dataclasses.asdict(one) | {"kind": one.kind.value} for one in trace.spans],
            "report": self.report.to_dict(),
            "full": full.to_dict() if full else None,
            "full_estimate_ms": trace.full_ms,
            "text": self.text,
        }


def stages(report: Report) -> list[Stage]:
    """The stages that took time, in order; what no figure names is the first token's."""
    known = {
        "search": report.search_ms,
        "match": report.match_ms,
        "load": report.load_ms,
        "prefill": report.fuse_ms,
    }
    known["first token"] = max(0.0, report.ttft_ms - sum(known.values()))
    known["further tokens"] = max(0.0, report.total_ms - report.ttft_ms)
    begins = accumulate(known.values(), initial=0.0)
    pairs = zip(known.items(), begins, strict=False)
    return [Stage(name, begin, ms) for (name, ms), begin in pairs if ms]


def said(part: TracePart) -> str:
    """What became of a part, in words."""
    found = f"{part.tokens} tokens"
    if part.origin is None:
        why = {"missed": "no KV yet", "unused": "its KV is not used by this method"}
        return f"{found}, computed: {why[part.state]}"
    found += f" from {_TIERS.get(part.origin.tier, part.origin.tier)}"
    if part.origin.load_ms is not None and part.origin.load_ms >= _LEAST_MS:
        how = " (waited {:.1f} ms)" if part.origin.tier == "ahead" else " in {:.1f} ms"
        found += how.format(part.origin.load_ms)
    if part.moved_by:
        found += f", moved {'on' if part.moved_by > 0 else 'back'} by {abs(part.moved_by)}"
    again = [
        f"{part.counts[kind]} {word}"
        for kind, word in (
            (Kind.REPAIRED, "repaired"),
            (Kind.IN_PART, "repaired in part"),
            (Kind.COMPUTED, "computed"),
        )
        if part.counts[kind]
    ]
    return ", ".join([found, *again])


def _plain(counts: Counts) -> dict[str, int]:
    return {kind.value: count for kind, count in counts.items()}


_HERE = Path(__file__).parent

# C0 and C1 controls but for tabs and line ends, marks of direction, surrogates, noncharacters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_WIDTH = 40


def page(shown: Explanation, *, is_whole: bool) -> str:
    """The page; or, for a notebook, only what is in it, with its style."""
    compared = [("", stages(shown.report))]
    if shown.full is not None:
        compared = [("As it was", stages(shown.report)), ("With full prefill", stages(shown.full))]
    longest = max((one.begin_ms + one.ms for _, found in compared for one in found), default=1.0)
    return _template().render(
        shown=shown,
        is_whole=is_whole,
        style=Markup((_HERE / "explanation.css").read_text(encoding="utf-8")),
        meaning=MEANING,
        said=said,
        not_known=NOT_KNOWN,
        kinds=list(Kind),
        compared=compared,
        longest=longest,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string((_HERE / "explanation.html").read_text(encoding="utf-8"))


def _finalized(value: object) -> object:
    """What is printed for a value: text that can be seen. What the template made stays."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


def visible(text: str) -> str:
    """The text, with the number of each character that cannot be seen in its place."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def _bars(stages: list[Stage]) -> list[str]:
    """A line for each stage, with a bar where it lies in the whole time."""
    scale = _WIDTH / max(1e-9, sum(stage.ms for stage in stages))
    return [
        f"  {stage.name:<14} {stage.said:>10}  "
        f"{' ' * int(stage.begin_ms * scale)}{'█' * round(stage.ms * scale) or '▏'}"
        for stage in stages
    ]
