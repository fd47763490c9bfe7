"""Parses PML's XML to a tree of elements with their places in the file; settles white space.

Knows no schema. Uses Python's expat. Document types are refused, and with them all entities except
XML's own five.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.parsers.expat import ErrorString, ExpatError, ParserCreate

from cached_rag.errors import PMLError
from cached_rag.options import near

_DEPTH = 64
# What expat says where a tag was not closed.
_UNCLOSED = ("no element found", "mismatched tag")
_WEIGHT = ("", " ", "\n", "\n\n")


class Where(NamedTuple):
    """A place in a file, or in a string, which has none.

    Lines and columns count from 1; 0 means that the place is unknown.
    """

    line: int = 0
    column: int = 0
    file: str | None = None


NOWHERE = Where()


@dataclass
class Element:
    """A tag with its attributes and content, in document order."""

    tag: str
    attributes: Mapping[str, str]
    where: Where
    content: list[Element | Chars] = field(default_factory=list)


@dataclass
class Chars:
    """Text between tags.

    Attributes:
        is_code: it is CDATA, whose lines keep their indentation.
    """

    text: str
    where: Where
    is_code: bool = False


def parse_markup(source: str, file: str | None = None) -> Element:
    """The root element of an XML text.

    Raises:
        PMLError: it is no string or not well-formed, has a document type, or is nested too deeply.
    """
    if not isinstance(source, str):
        what = f"PML is a string, or in a file (`from_file`), not {source!r}"
        raise PMLError(what, Where(file=file))
    return _Builder(file).build(source)


def _explained(message: str, source: str, where: Where) -> str:
    """The XML parser's message, with a remedy for the most likely mistake."""
    line = re.split("\r\n?|\n", source)[where.line - 1]
    around = line[max(0, where.column - 12) : where.column + 12].strip()
    return (
        f"not well-formed XML ({message}) near {around!r}; in text, write &lt; for < and &amp; "
        "for &, or put code into <![CDATA[ ... ]]>"
    )


class _Builder:
    """Builds elements from expat's events, and joins text that comments or expat have split."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._open = [Element("", {}, NOWHERE)]
        self._pieces: list[str] = []  # of the text that is being read, and where it began
        self._begun = NOWHERE
        self._is_code = False
        # The source is a string encoded here, so its XML declaration of an encoding does not count.
        self._parser = ParserCreate("utf-8")
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype
        self._parser.StartElementHandler = self._begin
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._chars
        self._parser.StartCdataSectionHandler = lambda: self._set_code(True)
        self._parser.EndCdataSectionHandler = lambda: self._set_code(False)

    def build(self, source: str) -> Element:
        try:
            self._parser.Parse(source.encode("utf-8"), True)
        except UnicodeEncodeError as error:
            raise PMLError(f"half a character: {error}", Where(1, 1, self._file)) from error
        except ExpatError as error:
            where = Where(error.lineno, error.offset + 1, self._file)
            message = ErrorString(error.code)
            if message in _UNCLOSED and (unclosed := self._open[-1]).tag:
                message += f": <{unclosed.tag}> of line {unclosed.where.line} is open"
            raise PMLError(_explained(message, source, where), where) from error
        (root,) = self._open[0].content
        assert isinstance(root, Element)
        return root

    def _refuse_doctype(self, *_: object) -> None:
        raise PMLError("document types and entities are not allowed", self._where())

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._open) > _DEPTH:  # hostile: it would exhaust the stack of who walks the tree
            raise PMLError(f"tags nested deeper than {_DEPTH}", self._where())
        self._end_chars()
        element = Element(tag, attributes, self._where())
        self._open[-1].content.append(element)
        self._open.append(element)

    def _end(self, _: str) -> None:
        self._end_chars()
        self._open.pop()

    def _chars(self, text: str) -> None:
        if not self._pieces:
            self._begun = self._where()
        self._pieces.append(text)

    def _end_chars(self) -> None:
        """Join the pieces only here: the parser may give one per line."""
        if self._pieces:
            said = Chars("".join(self._pieces), self._begun, self._is_code)
            self._open[-1].content.append(said)
        self._pieces = []

    def _set_code(self, is_code: bool) -> None:
        self._end_chars()  # what stands beside CDATA loses its indentation, as other text does
        self._is_code = is_code

    def _where(self) -> Where:
        parser = self._parser
        return Where(parser.CurrentLineNumber, parser.CurrentColumnNumber + 1, self._file)


def check_attributes(element: Element, known: Iterable[str]) -> None:
    """Refuse unknown attributes.

    Raises:
        PMLError: the element has an attribute that is not in `known`.
    """
    for name in element.attributes.keys() - set(known):
        message = f"<{element.tag}> has no attribute {name!r}{nearest(name, known)}"
        raise PMLError(message, element.where)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an error: the known name nearest to `name`, or all names if none is near."""
    known = sorted(known)
    if close := near(name, known):
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else "; there are none"


def split(text: str, *, is_code: bool = False) -> tuple[str, str, str]:
    """(separator before, the text without common indentation, separator after).

    A separator is white space reduced to a space, a line break or a blank line. The indentation of
    code is kept.
    """
    body = text.strip()
    if not body:
        return _separator(text), "", ""
    at = text.index(body)
    before, after = text[:at], _separator(text[at + len(body) :])
    if is_code:
        before, newline, indent = before.rpartition("\n")
        return _separator(before + newline), indent + body, after
    if "\n" in before:
        # The text begins on a line of its own, so that line's indentation counts as well.
        indent = before.rpartition("\n")[2]
        return _separator(before), textwrap.dedent(indent + body).strip(), after
    first, newline, rest = body.partition("\n")
    return _separator(before), first + newline + textwrap.dedent(rest), after


def _separator(space: str) -> str:
    return _WEIGHT[min(3, 1 + space.count("\n"))] if space else ""


def wider(first: str, second: str) -> str:
    """The wider of two separators."""
    return max(first, second, key=_WEIGHT.index)
