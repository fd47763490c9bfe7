"""PowerPoint's slides as HTML: titles, numbers of lists, tables, and the speaker's notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cached_rag.rag.archive import Archive, local, value
from cached_rag.rag.document import Part
from cached_rag.rag.html import tree_parts
from cached_rag.rag.numerals import numeral, numeral_kind

_TAGS = {"tbl": "table", "tr": "tr", "tc": "td", "br": "br", "txBody": "div"}
_TITLES = ("title", "ctrTitle")
# What is no text of the slide: places for its number, and what old versions show instead.
_HIDDEN = ("Fallback", "extLst")


def read_pptx(path: Path) -> list[Part]:
    """The text of the slides that are shown, in order, each with its notes."""
    parts: list[Part] = []
    with Archive(path) as archive:
        title = archive.xml("docProps/core.xml").findtext("{*}title")
        parts.append((f"Title: {title}" if title else "", {}))
        for name in _slides(archive):
            slide = archive.xml(name)
            if value(slide, "show") not in ("0", "false"):
                parts += _written(slide)
                notes = archive.xml(archive.first(name, "notesSlide"))
                for shape in notes.iterfind(".//{*}sp"):
                    if _place(shape) == "body":
                        parts += _written(shape)
    return parts


def _slides(archive: Archive) -> Iterator[str]:
    show = archive.first("", "officeDocument")
    related = archive.related(show)
    for slide in archive.xml(show).iterfind("{*}sldIdLst/{*}sldId"):
        names = [related[key][1] for key in slide.attrib.values() if key in related]
        yield from names


def _place(shape: Any) -> str:
    """Which of a layout's places a shape fills: "title", "body"; "" for none."""
    found = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
    return "" if found is None else value(found, "type")


def _written(root: Any) -> list[Part]:
    """The text of a tree, whose elements get HTML's names."""
    counts: dict[tuple[Any, ...], int] = {}
    block = "p"
    for element in list(root.iter("{*}*")):
        name = local(element)
        element.tail = None
        if name != "t":
            element.text = None
        if name == "sp":
            block = "h2" if _place(element) in _TITLES else "div"
        elif name == "graphicFrame":
            block = "div"
        elif name in _HIDDEN or _is_number(element):
            element.set("hidden", "")
        elif name == "txBody":
            counts = {}
        elif name == "p":
            element.text = _mark(element, counts)
            element.tag = block
            continue
        element.tag = _TAGS.get(name, "span")
    return tree_parts(root)


def _is_number(element: Any) -> bool:
    return local(element) == "fld" and value(element, "type") == "slidenum"


def _mark(paragraph: Any, counts: dict[tuple[Any, ...], int]) -> str:
    """What stands before a paragraph, if it is a list's.

    Args:
        counts: how many paragraphs of each level were counted, since one of a higher level.
    """
    properties = paragraph.find("{*}pPr")
    level = 0 if properties is None else int(value(properties, "lvl") or 0)
    scheme = None if properties is None else properties.find("{*}buAutoNum")
    is_bullet = properties is not None and properties.find("{*}buChar") is not None
    kind = "" if scheme is None else value(scheme, "type")
    start = 1 if scheme is None else int(value(scheme, "startAt") or 1)
    for key in [key for key in counts if key[0] > level or (key[0] == level and not kind)]:
        del counts[key]
    if scheme is None:
        return "- " if is_bullet else ""
    number = counts[level, kind, start] = counts.get((level, kind, start), start - 1) + 1
    said = numeral(number, numeral_kind(kind.replace("P", " P", 1)))
    before, behind = "(" if "ParenBoth" in kind else "", ")" if "Paren" in kind else "."
    return f"{before}{said}{behind} "
