"""Turns HTML into text, and keeps its layout and headings. Knows inscriptis and lxml alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from typing import Any

from inscriptis.css_profiles import CSS_PROFILES
from inscriptis.html_engine import Inscriptis
from inscriptis.html_properties import Display
from inscriptis.model.config import ParserConfig
from inscriptis.model.css import CssParse
from inscriptis.model.html_element import DEFAULT_HTML_ELEMENT, HtmlElement
from inscriptis.model.tag import CustomHtmlTagHandlerMapping
from inscriptis.model.tag.table_tag import table_end_handler
from lxml.etree import ParserError
from lxml.html import HTMLParser, document_fromstring

from cached_rag.rag.document import Metadata, Part

_DECLARATION = re.compile(r"^<\?xml [^>]+?\?>")
# Shows nothing, as inscriptis does for scripts and styles.
_INVISIBLE = HtmlElement(display=Display.none)
# In <pre> these keep its line breaks and spaces, as in browsers; inscriptis has them start anew.
_INHERITING = (
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "div", "em"),
    *("font", "i", "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike"),
    *("strong", "sub", "sup", "time", "tt", "u", "var"),
)
# Stands for "&", as inscriptis would take "&copy" in a text for an entity. Is no character.
_AMPERSAND = "\ufdd0"
# Most characters or lines by which a style may move a text.
_MOST_SPACE = 20
# Most characters of all tables of a document as text. Cells are padded with spaces to equal widths.
_MOST_IN_TABLES = 50 << 20
# Most characters of a heading, without those above it, and most headings of a document.
_LONGEST_HEADING, _MOST_HEADINGS = 100, 10_000
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


def html_parts(html: str) -> list[Part]:
    """The text that a reader of the page sees, cut before each heading.

    Each part but the first knows its heading, behind those above it: "Install > Linux".

    Raises:
        ValueError: its tables, as text, would be too large for the memory; or the parser gives up.
    """
    if not html.strip():
        return []
    tables = CustomHtmlTagHandlerMapping(start_tag_mapping={}, end_tag_mapping={"table": _Tables()})
    config = ParserConfig(
        css=_css(),
        display_links=False,
        custom_html_tag_handler_mapping=tables,
        annotation_rules={name: [name] for name in _HEADINGS},
    )
    handler = config.attribute_handler
    handler.attribute_mapping = {**handler.attribute_mapping, "style": _style}
    found = Inscriptis(_without_ampersands(_tree(html)), config)
    text = found.get_text().replace(_AMPERSAND, "&")
    labels = [(one.start, one.end, one.metadata) for one in found.get_annotations()]
    headings = [label for label in sorted(labels) if _stands_alone(text, *label[:2])]
    return list(_parts(text, headings[:_MOST_HEADINGS]))


def _css() -> dict[str, HtmlElement]:
    css = {**CSS_PROFILES["relaxed"], "template": _INVISIBLE}
    css["body"] = copy(css["body"])  # inscriptis writes into it, also from other threads
    for tag in _INHERITING:
        css[tag] = copy(css.get(tag, DEFAULT_HTML_ELEMENT))
        css[tag].whitespace = None  # as around it
    return css


def _without_ampersands(tree: Any) -> Any:
    """A tree whose texts say `_AMPERSAND` for "&": its entities are decoded already.

    Inscriptis decodes them again, and in cells of tables once more for each table around them.
    """
    for element in tree.iter():
        if element.text and isinstance(element.tag, str):
            element.text = _marked(element.text)
        if element.tail:
            element.tail = _marked(element.tail)
    return tree


def _marked(text: str) -> str:
    return text.replace(_AMPERSAND, "").replace("&", _AMPERSAND)


def _tree(html: str) -> Any:
    """The page as a tree.

    Raises:
        ValueError: the parser leaves something out, mostly for tags that are nested too deeply.
    """
    # As inscriptis does, whose parser drops all that follows a text or attribute of 10 MB, such as
    # a picture in a data: address.
    html = _DECLARATION.sub("", html.strip(), count=1)
    parser = HTMLParser(huge_tree=True)
    try:
        tree = document_fromstring(html, parser=parser)
    except ParserError:  # there is no tag in it
        tree = document_fromstring(f"<pre>{html}</pre>", parser=parser)
    if fatal := parser.error_log.filter_from_fatals():
        raise ValueError(f"its end would be lost: {fatal[0].message}")
    return tree


def _stands_alone(text: str, begin: int, end: int) -> bool:
    """Whether lines of a text are a heading and nothing else.

    In cells of tables other text is beside it, and inscriptis may be wrong about where it stands.
    """
    said = text[begin:end]
    begin += len(said) - len(said.lstrip())
    end -= len(said) - len(said.rstrip())
    before = text.rfind("\n", 0, begin) + 1
    after = text.find("\n", end)
    return (
        begin < end
        and not (text[before:begin] + text[end : len(text) if after < 0 else after]).strip()
    )


def _parts(text: str, headings: list[tuple[int, int, str]]) -> Iterator[Part]:
    """A text cut before each heading.

    Args:
        headings: (begin, end, tag), in order.
    """
    above: dict[str, str] = {}  # a tag's last heading, of tags that are above
    begin = 0
    metadata: Metadata = {}
    for start, end, tag in headings:
        yield text[begin:start], metadata
        above = {other: said for other, said in above.items() if other < tag}
        above[tag] = " ".join(text[start:end].split())[:_LONGEST_HEADING]
        begin, metadata = max(start, begin), {"heading": " > ".join(above.values())}
    yield text[begin:], metadata


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
