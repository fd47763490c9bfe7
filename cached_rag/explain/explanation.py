"""An answer's prompt and times, explained. The one class that users see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cached_rag.engine.report import Report
from cached_rag.engine.trace import Trace
from cached_rag.errors import ConfigError
from cached_rag.explain.page import page, plain
from cached_rag.explain.view import View


class Explained(Protocol):
    """An answer: a `Generation`, a `Stream` that has begun, or an `Answer`."""

    @property
    def report(self) -> Report:
        """Its figures."""
        ...

    @property
    def trace(self) -> Trace | None:
        """What became of its prompt; None if that is not known."""
        ...


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
