"""Documents that are zipped XML, as HTML: Word's, PowerPoint's slides, EPUB's books.

With headings, numbers of lists, tables and notes. Nothing is run or fetched.
"""

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import unquote

from lxml import etree

from cached_rag.errors import DocumentError
from cached_rag.rag.document import Part
from cached_rag.rag.html import ROOT, html_parts, numeral, numeral_kind, tree_parts

# A small archive may hold a large document.
_MOST_BYTES = 200 << 20
_WORD_TAGS = {"body": "body", "tbl": "table", "tr": "tr", "tc": "td", "br": "br", "cr": "br"}
# "den" is what stands below in an equation's fraction.
_SAID = {"tab": "\t", "noBreakHyphen": "-", "ptab": "\t", "den": "/"}
# What Word's font Symbol shows for the letters from A and a on, and for other codes.
_SYMBOLS = {
    **{f"{at:X}": shown for at, shown in enumerate("ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", 65)},
    **{f"{at:X}": shown for at, shown in enumerate("αβχδεφγηιϕκλμνοπθρστυϖωξψζ", 97)},
    **{"A3": "\u2264", "A5": "\u221e", "AE": "\u2192", "B0": "\u00b0", "B1": "\u00b1"},
    **{"B3": "\u2265", "B4": "\u00d7", "B8": "\u00f7", "B9": "\u2260", "BB": "\u2248"},
}
# What a form may have around anything, such as a table's cell.
_AROUND = ("{*}sdt", "{*}sdtContent", "{*}customXml")
# A box of text stands twice, once for old versions.
_HIDDEN_IN_WORD = ("moveFrom", "Fallback", "rt")
_NOTES = {"footnoteReference": "footnote", "endnoteReference": "endnote"}
_OFF = ("0", "false", "off")
_VANISH = "{*}rPr/{*}vanish"
# Letters above the line, in Word; in OpenDocument, also by how much; on slides, by that alone.
_RAISED = re.compile("super|[1-9]")
_HEADING = re.compile(r"heading ([1-6])", re.IGNORECASE)
_LEVEL = re.compile(r"%([1-9])")
# Most styles that are based on each other.
DEEPEST = 20
_SLIDE_TAGS = {"tbl": "table", "tr": "tr", "tc": "td", "br": "br", "txBody": "div"}
_NUMBERED = "{*}pPr/{*}buAutoNum"
_TITLES = ("title", "ctrTitle")
# What is no text of the slide: places for its number, and what old versions show instead.
_HIDDEN_ON_SLIDES = ("Fallback", "extLst")


class Archive(zipfile.ZipFile):
    """An archive's members.

    Raises:
        DocumentError: unpacked it is too large.
        zipfile.BadZipFile: it is none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names = frozenset(self.namelist())
        size = sum(member.file_size for member in self.infolist())
        if size > _MOST_BYTES:
            self.close()
            raise DocumentError(
                f"{path}: unpacked it has {size} bytes, more than {_MOST_BYTES}; split the document"
            )

    def xml(self, name: str) -> Any:
        """A member as a tree, whose entities stay unread; an empty one if there is none."""
        if name not in self.names:
            return etree.Element("none")
        parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=True)
        return etree.fromstring(self.read(name), parser)

    def titled(self, name: str = "docProps/core.xml", path: str = "{*}title") -> Part:
        """The document's title by one of its members, as the first part of its text."""
        title = self.xml(name).findtext(path)
        return (f"Title: {title}" if title else "", {})

    def related(self, name: str) -> dict[str, tuple[str, str]]:
        """What a member of an Office document refers to: by its id, (kind, name)."""
        folder, _, own = name.rpartition("/")
        found = self.xml(join(folder, "_rels", f"{own}.rels"))
        return {
            one.get("Id", ""): (one.get("Type", "").rpartition("/")[2], _inside(name, one))
            for one in found.iterchildren("{*}Relationship")
            if one.get("TargetMode") != "External"
        }

    def first(self, name: str, kind: str) -> str:
        """The name of the first member of a kind that a member refers to; "" if there is none."""
        return next((to for found, to in self.related(name).values() if found == kind), "")


def _inside(name: str, relation: Any) -> str:
    return normpath(join("/", dirname(name), relation.get("Target", ""))).lstrip("/")


def _elements(root: Any) -> Iterator[tuple[Any, str]]:
    """The elements of a tree, of which only texts keep theirs, and their names."""
    for element in list(root.iter("{*}*")):
        name = etree.QName(element).localname
        element.tail = None
        if name != "t":
            element.text = _SAID.get(name)
        if name == "rad" and (under := element.find("{*}e")) is not None:
            under.addprevious(sign := etree.Element("span"))
            sign.text = ROOT
        yield element, name


def says(element: Any, name: str = "val") -> str:
    """What an attribute says, of whatever namespace; "" if there is none."""
    said = (text for key, text in element.items() if key.rpartition("}")[2] == name)
    return next(said, "")


def said_at(element: Any, path: str, name: str = "val") -> str:
    """What an attribute says of the element at a path; "" if there is none."""
    found = element.find(path)
    return "" if found is None else says(found, name)


def is_raised(element: Any, path: str, name: str) -> bool:
    """Whether an attribute of the element at a path says that letters stand above the line."""
    return _RAISED.match(said_at(element, path, name)) is not None


def read_epub(path: Path) -> list[Part]:
    """A book's title and pages, each page once.

    Raises:
        DocumentError: a page is missing, or in no known encoding.
    """
    with Archive(path) as archive:
        container = archive.xml("META-INF/container.xml")
        name = said_at(container, "{*}rootfiles/{*}rootfile", "full-path")
        parts = [archive.titled(name, "{*}metadata/{*}title")]
        for page in dict.fromkeys(_pages(archive, name)):
            try:
                data = archive.read(page)
                is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
                parts += html_parts(data.decode("utf-16" if is_utf16 else "utf-8-sig"))
            except (KeyError, UnicodeError) as error:
                raise DocumentError(f"{path}: its page {page} cannot be read ({error})") from error
    return parts


def _pages(archive: Archive, name: str) -> Iterator[str]:
    """The names of the pages, some of which are quoted in the book's list and others are not."""
    book = archive.xml(name)
    names = {one.get("id"): one.get("href", "") for one in book.iterfind("{*}manifest/{*}item")}
    for one in book.iterfind("{*}spine/{*}itemref"):
        href = names.get(one.get("idref"), "").partition("#")[0]
        as_written, meant = (normpath(join(dirname(name), h)) for h in (href, unquote(href)))
        yield as_written if as_written in archive.names else meant


def read_docx(path: Path) -> list[Part]:
    """A document's text; deleted and hidden text is left out."""
    with Archive(path) as archive:
        name = archive.first("", "officeDocument") or "word/document.xml"
        body = archive.xml(name)
        etree.strip_tags(body, *_AROUND)
        styles = _Styles(archive.xml(archive.first(name, "styles")))
        writer = _Marker(styles, _Numbering(archive.xml(archive.first(name, "numbering"))))
        writer.write(body)
        for kind in _NOTES.values():
            notes = archive.xml(archive.first(name, f"{kind}s"))
            for note in notes.iterchildren("{*}" + kind):
                if number := writer.notes.get((kind, says(note, "id"))):
                    writer.write(note)
                    note.text = f"[{number}] "
                    for block in note.iterchildren("p"):
                        block.tag = "div"
                    body.append(note)
        return [archive.titled(), *tree_parts(body)]


class _Styles:
    """What the paragraphs' styles say: the heading's level, and the list they number."""

    def __init__(self, root: Any) -> None:
        self._by_id = {says(style, "styleId"): style for style in root.iterchildren("{*}style")}

    def find(self, name: str, path: str) -> Any:
        """What a style, or one that it is based on, has at a path; None if none has."""
        for _ in range(DEEPEST):
            style = self._by_id.get(name)
            if style is None:
                return None
            if (found := style.find(path)) is not None:
                return found
            name = said_at(style, "{*}basedOn")
        return None

    def heading(self, name: str) -> str:
        """ "h1" to "h6", or "" if the style is no heading's."""
        style = self._by_id.get(name)
        called = "" if style is None else said_at(style, "{*}name")
        if called.lower() == "title":
            return "h1"
        if found := _HEADING.fullmatch(called):
            return f"h{found[1]}"
        level = self.find(name, "{*}pPr/{*}outlineLvl")
        return f"h{int(says(level)) + 1}" if level is not None and says(level) in "01234" else ""


class _Numbering:
    """The numbers of a document's lists, counted on."""

    def __init__(self, root: Any) -> None:
        self._levels = {
            says(one, "abstractNumId"): {
                says(level, "ilvl"): level for level in one.iterchildren("{*}lvl")
            }
            for one in root.iterchildren("{*}abstractNum")
        }
        self._lists = {says(one, "numId"): one for one in root.iterchildren("{*}num")}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: set[str] = set()

    def next(self, number: str, level: str) -> str:
        """What stands before the next paragraph of a list; "" if it is in none."""
        named = self._lists.get(number)
        if named is None or not level.isdecimal():
            return ""
        of = said_at(named, "{*}abstractNumId")
        levels, counts, depth = self._levels.get(of, {}), self._counts[of], int(level)
        if number not in self._begun:  # lists of one kind count on, but for those told not to
            self._begun.add(number)
            for one in named.iterchildren("{*}lvlOverride"):
                if start := said_at(one, "{*}startOverride"):
                    counts[int(says(one, "ilvl"))] = int(start) - 1
        known = levels.get(level)
        mark = "" if known is None else said_at(known, "{*}lvlText")
        if known is None or said_at(known, "{*}numFmt") == "bullet":
            return "" if mark.isspace() else "- "  # as pandoc marks an item's next paragraph
        counts[depth] = counts.get(depth, _start(known) - 1) + 1
        for deeper in [one for one in counts if one > depth]:
            del counts[deeper]

        def count(found: re.Match[str]) -> str:
            at = int(found[1]) - 1
            other = levels.get(str(at), known)
            kind = numeral_kind(said_at(other, "{*}numFmt"))
            return numeral(counts.get(at, _start(other)), kind)

        said = _LEVEL.sub(count, mark)
        return f"{said} " if said else ""


def _start(level: Any) -> int:
    return int(said_at(level, "{*}start") or 0)


@dataclass
class _Marker:
    """Makes HTML of Word's elements.

    Attributes:
        notes: the numbers of the notes that were referred to, by kind and id.
    """

    styles: _Styles
    numbering: _Numbering
    notes: dict[tuple[str, str], int] = field(default_factory=dict)

    def write(self, root: Any) -> None:
        """Give the elements of a tree HTML's names, and no text but that of runs."""
        for element, name in _elements(root):
            if name in _HIDDEN_IN_WORD or (name == "r" and self._is_hidden(element)):
                element.set("hidden", "")
            elif name in _NOTES:
                key = _NOTES[name], says(element, "id")
                element.text = f"[{self.notes.setdefault(key, len(self.notes) + 1)}]"
            elif name == "sym" and says(element, "font") == "Symbol":
                element.text = _SYMBOLS.get(says(element, "char")[-2:].upper())
            elif name == "p":
                self._write_paragraph(element)
                continue
            elif name in ("rPr", "pPr"):  # has elements that are called as those of text
                element.set("hidden", "")
            raised = name == "sup" or is_raised(element, "{*}rPr/{*}vertAlign", "val")
            element.tag = "sup" if raised else _WORD_TAGS.get(name, "span")

    def _write_paragraph(self, element: Any) -> None:
        style = said_at(element, "{*}pPr/{*}pStyle")
        listed = element.find("{*}pPr/{*}numPr")
        if listed is None:
            listed = self.styles.find(style, "{*}pPr/{*}numPr")
        if listed is not None and "".join(element.itertext("{*}t")).strip():
            level = said_at(listed, "{*}ilvl") or "0"
            element.text = self.numbering.next(said_at(listed, "{*}numId"), level)
        element.tag = self.styles.heading(style) or ("div" if element.text else "p")
        if _is_on(self.styles.find(style, _VANISH)):
            element.set("hidden", "")

    def _is_hidden(self, run: Any) -> bool:
        own = run.find(_VANISH)
        style = said_at(run, "{*}rPr/{*}rStyle")
        return _is_on(self.styles.find(style, _VANISH) if own is None else own)


def _is_on(switch: Any) -> bool:
    return switch is not None and says(switch) not in _OFF


def read_pptx(path: Path) -> list[Part]:
    """The text of the slides that are shown, in order, each with its notes."""
    with Archive(path) as archive:
        parts = [archive.titled()]
        for name in _slides(archive):
            slide = archive.xml(name)
            if says(slide, "show") not in ("0", "false"):
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
        yield from (related[key][1] for key in slide.attrib.values() if key in related)


def _place(shape: Any) -> str:
    """Which of a layout's places a shape fills: "title", "body"; "" for none."""
    return said_at(shape, "{*}nvSpPr/{*}nvPr/{*}ph", "type")


def _written(root: Any) -> list[Part]:
    """The text of a tree, whose elements get HTML's names."""
    counts: dict[tuple[Any, ...], int] = {}
    block = "p"
    for element, name in _elements(root):
        if name == "sp":
            block = "h2" if _place(element) in _TITLES else "div"
        elif name == "graphicFrame":
            block = "div"
        elif name in _HIDDEN_ON_SLIDES or says(element, "type") == "slidenum":
            element.set("hidden", "")
        elif name == "cNvPr" and says(element, "hidden") in ("1", "true"):
            element.getparent().getparent().set("hidden", "")
        elif name == "txBody":
            counts = {}
        elif name == "p":
            element.text = _mark(element, counts)
            element.tag = block
            continue
        raised = name == "sup" or is_raised(element, "{*}rPr", "baseline")
        element.tag = "sup" if raised else _SLIDE_TAGS.get(name, "span")
    return tree_parts(root)


def _mark(paragraph: Any, counts: dict[tuple[Any, ...], int]) -> str:
    """What stands before a paragraph, if it is a list's.

    Args:
        counts: how many paragraphs of each level were counted, since one of a higher level.
    """
    level = int(said_at(paragraph, "{*}pPr", "lvl") or 0)
    kind = said_at(paragraph, _NUMBERED, "type")
    start = int(said_at(paragraph, _NUMBERED, "startAt") or 1)
    for key in [key for key in counts if key[0] > level or (key[0] == level and not kind)]:
        del counts[key]
    if not kind:
        return "" if paragraph.find("{*}pPr/{*}buChar") is None else "- "
    number = counts[level, kind, start] = counts.get((level, kind, start), start - 1) + 1
    said = numeral(number, numeral_kind(kind.replace("P", " P", 1)))
    before, behind = "(" if "ParenBoth" in kind else "", ")" if "Paren" in kind else "."
    return f"{before}{said}{behind} "
