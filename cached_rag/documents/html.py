"""HTML to text with its layout kept. Knows inscriptis; knows no other format."""

from __future__ import annotations

from copy import copy

from inscriptis import get_text
from inscriptis.css_profiles import CSS_PROFILES
from inscriptis.html_properties import Display
from inscriptis.model.config import ParserConfig
from inscriptis.model.html_element import HtmlElement

# What scripts and styles are to inscriptis already.
_INVISIBLE = HtmlElement(display=Display.none)


def html_to_text(html: str) -> str:
    """The text that is seen."""
    if not html.strip():
        return ""
    css = {**CSS_PROFILES["relaxed"], "template": _INVISIBLE}
    css["body"] = copy(css["body"])  # inscriptis writes into it, whoever else is reading
    return str(get_text(html, ParserConfig(css=css, display_links=False)))
