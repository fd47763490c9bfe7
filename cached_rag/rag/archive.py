"""Documents that are archives of XML, as those of Word, OpenDocument and EPUB. Fetches nothing."""

from __future__ import annotations

import codecs
import zipfile
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from lxml import etree

from cached_rag.errors import DocumentError, MissingPackageError

# A small archive may hold a large document.
_MOST_BYTES = 200 << 20

SUFFIXES = (".rtf", ".json")


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


def read_office(path: Path) -> str:
    """A document's text.

    Raises:
        DocumentError: kreuzberg is not installed, or cannot read the file.
    """
    try:
        from kreuzberg import ExtractionConfig, detect_mime_type_from_path, extract_bytes_sync
    except ImportError as error:
        missing = MissingPackageError(f"reading {path.suffix} files", "docs", error)
        raise DocumentError(f"{path}: {missing}") from error
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # which it would take for text
    kind, config = detect_mime_type_from_path(str(path)), ExtractionConfig(use_cache=False)
    try:
        found = extract_bytes_sync(data, kind, config=config)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a bug in Rust is in Python
            raise
        raise DocumentError(f"{path}: the parser failed ({error}); repair or remove it") from error
    title = found.metadata.get("title")
    return f"Title: {title}\n\n{found.content}" if isinstance(title, str) else found.content
