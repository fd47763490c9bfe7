"""Documents that are archives of XML, as EPUB's books are. Fetches nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import unquote

from lxml import etree

from cached_rag.errors import DocumentError
from cached_rag.rag.document import Part
from cached_rag.rag.html import html_parts

# A small archive may hold a large document.
_MOST_BYTES = 200 << 20


class Archive:
    """An archive's members.

    Raises:
        DocumentError: unpacked it is too large.
        zipfile.BadZipFile: it is none.
    """

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.names = frozenset(self._zip.namelist())
        size = sum(member.file_size for member in self._zip.infolist())
        if size > _MOST_BYTES:
            self._zip.close()
            raise DocumentError(
                f"{path}: unpacked it has {size} bytes, more than {_MOST_BYTES}; split the document"
            )

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, name: str) -> bytes:
        """A member's bytes; KeyError if there is none of this name."""
        return self._zip.read(name)

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


def local(element: Any) -> str:
    """An element's name without its namespace; "" for comments."""
    tag = element.tag
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


def value(element: Any, name: str = "val") -> str:
    """What an attribute says, of whatever namespace; "" if there is none."""
    said = (text for key, text in element.items() if key.rpartition("}")[2] == name)
    return next(said, "")


def said_at(element: Any, path: str, name: str = "val") -> str:
    """What an attribute says of the element at a path; "" if there is none."""
    found = element.find(path)
    return "" if found is None else value(found, name)


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
                parts += html_parts(_page_text(archive.read(page)))
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


def _page_text(data: bytes) -> str:
    """A page's text, which is UTF-8 or UTF-16."""
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
