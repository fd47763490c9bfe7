"""EPUB's books: the pages that are read in order, as HTML. Fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote

from cached_rag.errors import DocumentError
from cached_rag.rag.archive import Archive
from cached_rag.rag.document import Part
from cached_rag.rag.html import html_parts


def read_epub(path: Path) -> list[Part]:
    """A book's title and pages, each page once.

    Raises:
        DocumentError: a page is missing, or in no known encoding.
    """
    with Archive(path) as archive:
        container = archive.xml("META-INF/container.xml")
        root = container.find("{*}rootfiles/{*}rootfile")
        name = "" if root is None else root.get("full-path", "")
        book = archive.xml(name)
        title = book.findtext("{*}metadata/{*}title")
        parts: list[Part] = [(f"Title: {title}" if title else "", {})]
        for page in dict.fromkeys(_pages(archive, name)):
            try:
                parts += html_parts(_text(archive.read(page)))
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


def _text(data: bytes) -> str:
    """A page's text, which is UTF-8 or UTF-16."""
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
