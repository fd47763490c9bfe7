"""Turns HTML into text and keeps its layout. Knows inscriptis; knows no other format."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

from inscriptis import get_text
from inscriptis.css_profiles import CSS_PROFILES
from inscriptis.html_properties import Display
from inscriptis.model.config import ParserConfig
from inscriptis.model.css import CssParse
from inscriptis.model.html_element import HtmlElement
from inscriptis.model.tag import CustomHtmlTagHandlerMapping
from inscriptis.model.tag.table_tag import table_end_handler

# Shows nothing, as inscriptis does for scripts and styles.
_INVISIBLE = HtmlElement(display=Display.none)
# Most characters or lines by which a style may move a text.
_MOST_SPACE = 20
# Most characters of all tables of a document as text. Cells are padded with spaces to equal widths.
_MOST_IN_TABLES = 50 << 20


def html_to_text(html: str) -> str:
    """The text that a reader of the page sees.

    Raises:
        ValueError: its tables, as text, would be too large for the memory.
    """
    if not html.strip():
        return ""
    css = {**CSS_PROFILES["relaxed"], "template": _INVISIBLE}
    css["body"] = copy(css["body"])  # inscriptis writes into it, also from other threads
    tables = CustomHtmlTagHandlerMapping(start_tag_mapping={}, end_tag_mapping={"table": _Tables()})
    config = ParserConfig(css=css, display_links=False, custom_html_tag_handler_mapping=tables)
    handler = config.attribute_handler
    handler.attribute_mapping = {**handler.attribute_mapping, "style": _style}
    return str(get_text(html, config))


def _style(style: str, element: HtmlElement) -> None:
    CssParse.attr_style(style, element)
    for name in ("padding_inline", "margin_before", "margin_after"):
        setattr(element, name, min(getattr(element, name), _MOST_SPACE))


class _Tables:
    """Called at the end of each table of a document; lays it out, unless they get too large."""

    def __init__(self) -> None:
        self._taken = 0

    def __call__(self, state: Any) -> None:
        if state.current_table:
            self._taken += _area(state.current_table[-1].rows)
        if self._taken > _MOST_IN_TABLES:
            raise ValueError(
                f"its tables would take more than {_MOST_IN_TABLES} characters as text, for every "
                "row is as wide as the widest"
            )
        table_end_handler(state)


def _area(rows: Any) -> int:
    """About how many characters a table has as text, where columns are as wide as their cells."""
    widths = Counter[int]()
    lines = 0
    for row in rows:
        height = 1
        for index, cell in enumerate(row.columns):
            cell.flush_inline()
            text = [line for block in cell.blocks for line in block.split("\n")]
            widths[index] = max(widths[index], max(map(len, text), default=0))
            height = max(height, len(text))
        lines += height
    return lines * (sum(widths.values()) + len(widths))
