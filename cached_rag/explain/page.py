"""An explanation as a page of HTML.

Everything that the template prints is escaped and made visible; documents are not trusted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from cached_rag.engine.trace import Kind
from cached_rag.explain.view import MEANING, NOT_KNOWN, View, stages
from cached_rag.explain.visible import visible

_HERE = Path(__file__).parent


def page(view: View, *, is_whole: bool) -> str:
    """The page; or, for a notebook, only what is in it, with its style."""
    compared = [("", view.stages)]
    if view.full is not None:
        compared = [("As it was", view.stages), ("With full prefill", stages(view.full))]
    longest = max((one.begin_ms + one.ms for _, found in compared for one in found), default=1.0)
    return _template().render(
        view=view,
        is_whole=is_whole,
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
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
    return environment.from_string((_HERE / "page.html").read_text(encoding="utf-8"))


def _finalized(value: object) -> object:
    """What is printed for a value: text that can be seen. What the template made stays."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)
