"""PML as a tree of elements that know where they stand. Knows XML; knows no schema.

Parsed with defusedxml: no DTD, no entities beyond XML's own, nothing external.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler, LexicalHandler, property_lexical_handler
from xml.sax.xmlreader import InputSource

from defusedxml import DefusedXmlException
from defusedxml.sax import make_parser

from cached_rag.errors import PMLError
from cached_rag.pml.nodes import Where

_DEPTH = 64
# Comparing names takes time with the product of their lengths.
_COMPARED = 100


@dataclass
class Element:
    """A tag with its content: elements, and strings with where they begin."""

    tag: str
    attributes: Mapping[str, str]
    where: Where
    content: list[Element | Chars] = field(default_factory=list)


@dataclass
class Chars:
    """Text between tags.

    Attributes:
        is_code: some of it was CDATA, whose lines keep their indentation.
    """

    text: str
    where: Where
    is_code: bool = False


def parse_markup(source: str, file: str | None = None) -> Element:
    """The root element.

    Raises:
        PMLError: not well-formed, or it holds what a prompt has no use for.
    """
    handler = _Handler()
    parser = make_parser()
    parser.setContentHandler(handler)
    parser.forbid_dtd = True
    parser.setProperty(property_lexical_handler, handler)
    try:
        encoded = InputSource()
        encoded.setByteStream(io.BytesIO(source.encode("utf-8")))
        encoded.setEncoding("utf-8")  # whatever a declaration says of the file it was read from
        parser.parse(encoded)
    except UnicodeEncodeError as error:
        raise PMLError(f"half a character: {error}", Where(1, 1), file) from error
    except _DeepError as error:
        raise PMLError(f"tags nested deeper than {_DEPTH}", error.where, file) from error
    except SAXParseException as error:
        where = Where(error.getLineNumber() or 1, (error.getColumnNumber() or 0) + 1)
        raise PMLError(_explained(error.getMessage(), source, where), where, file) from error
    except DefusedXmlException as error:
        where = Where(parser.getLineNumber() or 1, (parser.getColumnNumber() or 0) + 1)
        raise PMLError("document types and entities are not allowed", where, file) from error
    assert handler.root is not None
    return handler.root


def _explained(message: str, source: str, where: Where) -> str:
    """The XML parser's words, and a remedy for the mistake that is most likely."""
    line = source.splitlines()[where.line - 1 : where.line]
    around = line[0][max(0, where.column - 12) : where.column + 12].strip() if line else ""
    return (
        f"not well-formed XML ({message}) near {around!r}; in text, write &lt; for < and &amp; "
        "for &, or put code into <![CDATA[ ... ]]>"
    )


class _DeepError(Exception):
    """A document made to exhaust the stack of whoever walks its tree."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self.where = where


class _Handler(ContentHandler, LexicalHandler):
    """Builds elements; joins text that comments or the parser have torn apart."""

    def __init__(self) -> None:
        super().__init__()
        self.root: Element | None = None
        self._open: list[Element] = []
        self._locator: Any = None
        self._is_code = False
        self._chars: Chars | None = None
        self._pieces: list[str] = []

    def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802 (SAX's name)
        self._locator = locator

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802
        element = Element(name, dict(attrs), self._where())
        if len(self._open) == _DEPTH:
            raise _DeepError(element.where)
        self._end_chars()
        if self._open:
            self._open[-1].content.append(element)
        else:
            self.root = element
        self._open.append(element)

    def endElement(self, name: str) -> None:  # noqa: N802
        self._end_chars()
        self._open.pop()

    def characters(self, content: str) -> None:
        if self._chars is None:
            self._chars = Chars("", self._where())
            self._open[-1].content.append(self._chars)
        self._pieces.append(content)
        self._chars.is_code |= self._is_code

    def _end_chars(self) -> None:
        """Join the pieces at once: the parser may bring one a line."""
        if self._chars is not None:
            self._chars.text = "".join(self._pieces)
            self._chars, self._pieces = None, []

    def startCDATA(self) -> None:  # noqa: N802
        self._is_code = True

    def endCDATA(self) -> None:  # noqa: N802
        self._is_code = False

    def _where(self) -> Where:
        return Where(self._locator.getLineNumber(), self._locator.getColumnNumber() + 1)


def check_attributes(element: Element, known: Iterable[str], file: str | None) -> None:
    """Refuse attributes that mean nothing here.

    Raises:
        PMLError: an attribute that is not in `known`.
    """
    for name in element.attributes.keys() - set(known):
        message = f"<{element.tag}> has no attribute {name!r}{nearest(name, known)}"
        raise PMLError(message, element.where, file)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what may have been meant; with nothing near, at what there is."""
    known = sorted(known)
    if len(name) <= _COMPARED and (close := get_close_matches(name, known, n=1)):
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else "; there are none"
