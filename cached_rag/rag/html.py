"""Turns HTML into text with its blocks apart, and keeps its headings. Knows lxml alone.

Written here because no library with a free licence keeps an author's numbers, leaves out what is
hidden, and keeps the cells of tables apart, empty ones too, without markup of its own.
"""

import re
from typing import Any

from lxml import etree
from lxml.html import HTMLParser, document_fromstring

from cached_rag.rag.document import Metadata, Part

_DECLARATION = re.compile(r"^<\?xml\s[^>]+?\?>")
# An equation's annotation is the equation once more, as TeX; what KaTeX draws is so, too.
_HIDDEN_TAGS = ("head", "script", "style", "template", "datalist", "rp", "annotation")
_DRAWN = "katex-html"
_HIDDEN = re.compile(r"display\s*:\s*none\b|visibility\s*:\s*(?:hidden|collapse)\b", re.IGNORECASE)
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_AS_WRITTEN = ("pre", "listing", "xmp", "plaintext", "textarea")
_LISTS = ("ol", "ul", "menu", "dir")
# How many line ends stand before and behind an element; behind any other there is none.
_APART = {
    **dict.fromkeys((*_HEADINGS, *_AS_WRITTEN, *_LISTS, "p", "table", "dl", "blockquote", "hr"), 2),
    **dict.fromkeys(("div", "section", "article", "aside", "main", "nav", "header", "footer"), 1),
    **dict.fromkeys(("details", "summary", "fieldset", "legend", "form", "dialog", "address"), 1),
    **dict.fromkeys(("li", "dt", "dd", "tr", "caption", "figure", "figcaption"), 1),
    **dict.fromkeys(("select", "optgroup", "option", "button", "center", "hgroup", "search"), 1),
    **dict.fromkeys(("body", "html", "title", "video", "audio", "object", "iframe", "canvas"), 1),
}
# What links to notes say of themselves.
_NOTES = {"doc-noteref", "noteref"}
# What stands between the two parts of an equation's element, and before all of a root.
_PARTED = {"msup": "^", "mfrac": "/", "mroot": "^1/"}
ROOT = "\u221a"
_NUMBER = re.compile(r"\s*[+-]?\d{1,9}\s*")
_POWER = re.compile(r"\s*[-+\u2212]?\d")
# Numbers of lists as their authors write them: what HTML, docutils, Word and PowerPoint, and
# OpenDocument call them.
_KINDS = {
    **dict.fromkeys(("a", "lowerLetter", "loweralpha", "alphaLc"), "a"),
    **dict.fromkeys(("A", "upperLetter", "upperalpha", "alphaUc"), "A"),
    **dict.fromkeys(("i", "lowerRoman", "lowerroman", "romanLc"), "i"),
    **dict.fromkeys(("I", "upperRoman", "upperroman", "romanUc"), "I"),
}
_ROMAN = {
    **{1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl"},
    **{10: "x", 9: "ix", 5: "v", 4: "iv", 1: "i"},
}
# An attribute for what stands before a list's item.
_MARK = "cached-rag-mark"
# Most characters that a line is moved to the right by.
_MOST_SPACE = 20
# Most characters of a heading, without those above it.
_LONGEST_HEADING = 100


def html_parts(html: str) -> list[Part]:
    """The text that a reader of the page sees, cut before each heading.

    Each part but the first knows its heading, behind those above it: "Install > Linux".

    Raises:
        ValueError: the parser gives up.
    """
    return tree_parts(_tree(html)) if html.strip() else []


def tree_parts(tree: Any) -> list[Part]:
    """As `html_parts`, of an lxml tree, from which comments are taken."""
    etree.strip_tags(tree, etree.Comment, etree.ProcessingInstruction, etree.Entity)
    page = _Page()
    walk = etree.iterwalk(tree, events=("start", "end"))
    hidden = None
    for event, element in walk:
        if event == "start" and _is_hidden(element):
            hidden = element
            walk.skip_subtree()
        elif event == "start":
            page.start(element)
        else:
            page.end(element, is_shown=element is not hidden)
    return page.parts()


def _tree(html: str) -> Any:
    """The page as a tree.

    Raises:
        ValueError: the parser leaves something out, mostly for tags that are nested too deeply.
    """
    # Without huge_tree all is dropped that follows a text or attribute of 10 MB, such as a picture
    # in a data: address.
    html = _DECLARATION.sub("", html.strip(), count=1)
    parser = HTMLParser(huge_tree=True)
    try:
        tree = document_fromstring(html, parser=parser)
    except etree.ParserError:  # there is no tag in it
        tree = document_fromstring(f"<pre>{html}</pre>", parser=parser)
    if fatal := parser.error_log.filter_from_fatals():
        raise ValueError(f"its end would be lost: {fatal[0].message}")
    for link in tree.iter("a"):
        if {link.get("role"), link.get("epub:type")} & _NOTES:  # 10 with note 1 is not 101
            said = "".join(link.itertext()).strip(" []")
            del link[:]
            link.text = f"[{said}]"
    return tree


def _is_hidden(element: Any) -> bool:
    if element.tag == "tr" and not any(text.strip() for text in element.itertext()):
        return True
    is_styled_away = _HIDDEN.search(element.get("style", "")) is not None
    is_left_out = element.tag in _HIDDEN_TAGS or element.get("class") == _DRAWN
    return is_left_out or "hidden" in element.attrib or is_styled_away


class _Page:
    """The text of elements, as they start and end."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._text: list[str] = []
        self._metadata: Metadata = {}
        self._above: dict[str, str] = {}  # the last heading of each tag that is above
        # What is to stand before the next word.
        self._lines, self._space, self._mark = 0, False, ""
        self._moved = 0  # by how many characters lines are moved to the right
        self._as_written = 0  # how many elements around keep white space
        # Rows around, whether their cells stand in one line, as they do without tables in them.
        self._rows: list[bool] = []
        self._lists = 0  # how many are around
        self._in_line = False

    def parts(self) -> list[Part]:
        """All that was written."""
        self._cut()
        return self._parts

    def start(self, element: Any) -> None:
        tag = element.tag
        self._break(element)
        if tag in _HEADINGS and not self._in_line:
            self._cut()
        elif tag == "br":
            self._end_lines(self._lines + 1)
        elif tag == "tr":
            self._rows.append(next(element.iterdescendants("table", *_AS_WRITTEN), None) is None)
        elif tag in ("td", "th"):
            self._begin_cell(element)
        elif tag in _LISTS:
            self._lists += 1
            _number_items(element)
        elif tag == "li":
            self._mark += element.get(_MARK, "- ")
            self._moved += 2
        elif tag == "dd":
            self._moved += 2
        elif tag == "sup" and self._is_power(element):
            self._write("^")  # 10 to the power of 6 is not 106
        elif mark := _parted(element):
            self._write(mark)
        self._as_written += tag in _AS_WRITTEN
        if element.text:
            self._say(element.text.removeprefix("\n") if tag == "pre" else element.text)

    def end(self, element: Any, *, is_shown: bool) -> None:
        """Take an element's end, and the text behind it."""
        if is_shown:
            self._close(element, element.tag)
            self._break(element)
        if element.tail:
            self._say(element.tail)

    def _close(self, element: Any, tag: str) -> None:
        self._as_written -= tag in _AS_WRITTEN
        if tag in _HEADINGS and not self._in_line:
            self._name(tag)
        elif tag == "tr":
            self._rows.pop()
        elif tag in ("td", "th"):
            self._in_line = False
        elif tag in _LISTS:
            self._lists -= 1
        elif tag == "li":
            self._moved, self._mark = self._moved - 2, ""
        elif tag == "dd":
            self._moved -= 2

    def _is_power(self, element: Any) -> bool:
        is_behind_word = bool(self._text) and not (self._space or self._lines)
        return is_behind_word and _POWER.match("".join(element.itertext())) is not None

    def _break(self, element: Any) -> None:
        is_inner = element.tag in _LISTS and self._lists > 0
        is_close = is_inner or _is_an_items(element)
        self._end_lines(1 if is_close else _APART.get(element.tag, 0))

    def _end_lines(self, lines: int) -> None:
        if self._in_line:
            self._space = self._space or lines > 0
        else:
            self._lines = max(self._lines, lines)

    def _begin_cell(self, element: Any) -> None:
        self._in_line = bool(self._rows) and self._rows[-1]
        if not self._in_line:
            self._end_lines(1)
        elif next(element.itersiblings("td", "th", preceding=True), None) is not None:
            self._say(" | ")

    def _say(self, text: str) -> None:
        if self._as_written and not self._in_line:
            for at, line in enumerate(text.split("\n")):
                self._lines += at > 0
                if line:
                    self._write(line)
            return
        self._space = self._space or text[:1].isspace()
        if said := " ".join(text.split()):
            self._write(said)
            self._space = text[-1:].isspace()

    def _write(self, text: str) -> None:
        self._text += (self._before(), self._mark, text)
        self._lines, self._space, self._mark = 0, False, ""

    def _before(self) -> str:
        moved = self._moved - 2 if self._mark else self._moved
        space = " " * min(moved, _MOST_SPACE)
        if not self._text:
            return space
        if self._lines:
            return "\n" * self._lines + space
        return " " if self._space else ""

    def _cut(self) -> None:
        self._parts.append(("".join(self._text), self._metadata))
        self._text.clear()

    def _name(self, tag: str) -> None:
        """Let what follows have the heading that was just written, behind those above it."""
        said = " ".join("".join(self._text).split())[:_LONGEST_HEADING]
        self._above = {other: text for other, text in self._above.items() if other < tag}
        self._above |= {tag: said} if said else {}
        self._metadata = {"heading": " > ".join(self._above.values())} if self._above else {}


def _parted(element: Any) -> str:
    """What parts it from what stands before it in an equation; "" if nothing does."""
    if element.tag == "msqrt":
        return ROOT
    around = element.getparent()
    mark = "" if around is None else _PARTED.get(around.tag, "")
    return mark if mark and around[0] is not element else ""


def _is_an_items(element: Any) -> bool:
    """Whether it is the only paragraph of a list's item."""
    around, next_one = element.getparent(), element.getnext()
    is_first = around is not None and around.tag in ("li", "dd") and around[0] is element
    is_only = next_one is None or next_one.tag in _LISTS
    return element.tag == "p" and is_first and is_only


def _number_items(numbered: Any) -> None:
    """Give the items of a list their numbers, if they have any."""
    if numbered.tag != "ol":
        return
    items = [item for item in numbered.iterchildren("li") if not _is_hidden(item)]
    is_reversed = "reversed" in numbered.attrib
    number = _whole(numbered.get("start"), len(items) if is_reversed else 1)
    kind = numeral_kind(numbered.get("type") or numbered.get("class", ""))
    for item in items:
        number = _whole(item.get("value"), number)
        item.set(_MARK, f"{numeral(number, kind)}. ")
        number += -1 if is_reversed else 1


def _whole(said: str | None, other: int) -> int:
    return int(said) if said and _NUMBER.fullmatch(said) else other


def numeral_kind(name: str) -> str:
    """The kind of numerals that one of these words names: a, A, i, I; or "" for the usual ones."""
    return next((_KINDS[word] for word in name.split() if word in _KINDS), "")


def numeral(number: int, kind: str = "") -> str:
    """A number in numerals of a kind; in the usual ones if that has none for it."""
    if kind in ("a", "A") and 0 < number <= 260:
        said = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)
    elif kind in ("i", "I") and 0 < number < 4000:
        said = ""
        for value, letters in _ROMAN.items():
            said += letters * (number // value)
            number %= value
    else:
        return str(number)
    return said.upper() if kind in ("A", "I") else said
