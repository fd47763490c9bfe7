"""What became of a prompt, for people: as a page of HTML, in a notebook, or as plain text.

Everything that the template prints is escaped and made visible; documents are not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from cached_rag.engine.report import Report
from cached_rag.engine.trace import Kind, Trace
from cached_rag.engine.view import MEANING, NOT_KNOWN, Stage, View, stages
from cached_rag.errors import ConfigError

_HERE = Path(__file__).parent

# C0 and C1 controls but for tabs and line ends, marks of direction, surrogates, noncharacters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_WIDTH = 40


def page(view: View, *, is_whole: bool) -> str:
    """The page; or, for a notebook, only what is in it, with its style."""
    compared = [("", view.stages)]
    if view.full is not None:
        compared = [("As it was", view.stages), ("With full prefill", stages(view.full))]
    longest = max((one.begin_ms + one.ms for _, found in compared for one in found), default=1.0)
    return _template().render(
        view=view,
        is_whole=is_whole,
        style=Markup((_HERE / "explanation.css").read_text(encoding="utf-8")),
        meaning=MEANING,
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


def plain(view: View) -> str:
    """The text; the prompt itself is not in it."""
    total = max(1, view.report.prompt_tokens)
    lines = [view.report.to_line(), "", "tokens"]
    for kind, count in view.trace.counts.items():
        if count:
            lines.append(f"  {kind.value:<9} {count:>6} {count / total:>4.0%}  {MEANING[kind]}")
    lines += ["", "parts of the prompt"]
    for row in view.rows:
        lines += [f"  {row.name}", f"      {row.said}"]
    lines += [f"  {name}\n      {NOT_KNOWN}" for name in view.unseen]
    lines += ["", "time", *_bars(view.stages)]
    if view.comparison:
        lines += ["", view.comparison]
    lines += [f"note: {note}" for note in view.report.notes]
    return visible("\n".join(lines))


def _bars(stages: list[Stage]) -> list[str]:
    """A line for each stage, with a bar where it lies in the whole time."""
    scale = _WIDTH / max(1e-9, sum(stage.ms for stage in stages))
    return [
        f"  {stage.name:<14} {stage.said:>10}  "
        f"{' ' * int(stage.begin_ms * scale)}{'█' * round(stage.ms * scale) or '▏'}"
        for stage in stages
    ]


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

    @property
    def _view(self) -> View:
        return View(self.trace, self.report, self.full, self.names, self.title, self.text)

    def __str__(self) -> str:
        return plain(self._view)

    def __repr__(self) -> str:
        return f"<Explanation of {self.report.prompt_tokens} prompt tokens>"

    def _repr_html_(self) -> str:
        return page(self._view, is_whole=False)

    def html(self) -> str:
        """A whole page, which loads nothing from elsewhere and runs no script."""
        return page(self._view, is_whole=True)

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return self._view.to_dict()
