"""OpenDocument's texts as HTML, and its sheets as tables. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cached_rag.rag.archive import Archive, local, value
from cached_rag.rag.document import Part
from cached_rag.rag.html import tree_parts
from cached_rag.rag.tables import sheet_parts

_TAGS = {
    **{"list": "ul", "list-item": "li", "p": "p", "table": "table", "line-break": "br"},
    **{"table-row": "tr", "table-cell": "td", "covered-table-cell": "td", "page": "div"},
}
_HIDDEN = ("tracked-changes", "annotation", "forms", "desc", "hidden-paragraph")
# Most cells or rows that one element stands for; programs write an empty one for all that follow.
_MOST_REPEATED = 50


def read_opendocument(path: Path) -> list[Part]:
    """A document's text as a reader sees it, with each note where it is referred to."""
    with Archive(path) as archive:
        content = archive.xml("content.xml")
        styles = [content, archive.xml("styles.xml")]
        parts = [archive.titled("meta.xml", ".//{*}title")]
    hidden = set(_hidden_styles(styles))
    body = content.find("{*}body")
    if body is None:
        return parts
    for table in body.iterfind("{*}spreadsheet/{*}table"):
        if value(table, "style-name") not in hidden:
            parts += sheet_parts(value(table, "name"), list(_rows(table)))
    if body.find("{*}spreadsheet") is None:
        _write(body, hidden, _ListStyles(styles))
        parts += tree_parts(body)
    return parts


def _hidden_styles(styles: list[Any]) -> Iterator[str]:
    for root in styles:
        for style in root.iterfind(".//{*}style"):
            if any(value(one, "display") in ("none", "false") for one in style):
                yield value(style, "name")


class _ListStyles:
    """The numbers of lists, by what the styles say and which lists go on."""

    def __init__(self, styles: list[Any]) -> None:
        self._levels = {
            (value(style, "name"), value(level, "level")): level
            for root in styles
            for style in root.iterfind(".//{*}list-style")
            for level in style.iterfind("{*}list-level-style-number")
        }
        self._counts: dict[str, int] = {}

    def number(self, one: Any) -> None:
        """Make a list, not yet renamed, HTML's."""
        around = [up for up in one.iterancestors() if up.get("depth")]
        depth = int(around[0].get("depth")) + 1 if around else 1
        style = value(one, "style-name") or (around[0].get("kind") if around else "")
        goes_on = value(one, "continue-numbering") == "true" or bool(value(one, "continue-list"))
        one.set("depth", str(depth))
        one.set("kind", style)
        level = self._levels.get((style, str(depth)))
        if level is None:
            return
        one.tag = "ol"
        first = int(value(level, "start-value") or 1)
        if goes_on and depth == 1:
            first = self._counts.get(style, first)
        one.set("start", str(first))
        one.set("type", value(level, "num-format"))
        if depth == 1:
            self._counts[style] = first + sum(1 for _ in one.iterfind("{*}list-item"))


def _write(body: Any, hidden: set[str], numbers: _ListStyles) -> None:
    """Give the elements of a tree HTML's names."""
    for element in list(body.iter("{*}*")):
        name = local(element)
        if name in _HIDDEN or value(element, "style-name") in hidden:
            element.set("hidden", "")
        element.tag = _TAGS.get(name, "span")
        if name == "h":
            level = value(element, "outline-level")
            element.tag = f"h{level}" if level in ("1", "2", "3", "4", "5") else "h6"
        elif name == "list":
            numbers.number(element)
        elif name in ("s", "tab"):
            element.text = " "
        elif name == "note-citation":
            element.text = f" [{element.text or ''}] "
        elif name == "list-item" and (start := value(element, "start-value")):
            element.set("value", start)


def _rows(table: Any) -> Iterator[list[str]]:
    """The cells' texts as they are shown, of the rows that have any."""
    for row in table.iter("{*}table-row"):
        cells: list[str] = []
        for cell in row.iterchildren("{*}table-cell", "{*}covered-table-cell"):
            said = "\n".join("".join(line.itertext()) for line in cell.iterfind("{*}p"))
            cells += [said] * _repeated(cell, "columns")
        if any(cells) and value(row, "visibility") in ("", "visible"):
            for _ in range(_repeated(row, "rows")):
                yield cells


def _repeated(element: Any, of: str) -> int:
    said = value(element, f"number-{of}-repeated")
    return min(int(said), _MOST_REPEATED) if said.isdecimal() else 1
