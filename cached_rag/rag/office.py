"""Office documents, tables, books and notebooks as text, by the kreuzberg library (extra "docs").

Its parsers are written in Rust; nothing in a document is executed or fetched. https://kreuzberg.dev
"""

from __future__ import annotations

import codecs
import io
import re
import zipfile
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote

from cached_rag.errors import DocumentError, MissingPackageError

_TEXTS = (".json", ".ipynb")
SUFFIXES = (".docx", ".pptx", ".xlsx", ".odt", ".ods", ".rtf", ".epub", *_TEXTS)
# Most documents are archives, and a small one may hold a large document.
_MOST_BYTES = 200 << 20
# Stand for what is markup where it is not escaped, as in `html.py`. Are no characters.
_STAND_INS = {character: chr(0xFDD0 + n) for n, character in enumerate("&<>\"'")}
_MARKUP = str.maketrans({stand_in: character for character, stand_in in _STAND_INS.items()})
# A reference in XML, or a stand-in that the document has of itself; in UTF-8.
_REFERENCE = re.compile(
    rb"&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6});|\xef\xb7[\x90-\x94]"
)
# What Word has elements for within a line.
_MARK = re.compile(rb"<w:(tab|cr|noBreakHyphen)\s*/>")
_MARKS = {
    b"tab": b'<w:t xml:space="preserve">\t</w:t>',
    b"cr": b"<w:br/>",
    b"noBreakHyphen": b"<w:t>-</w:t>",
}
_HREF = re.compile(rb"""(\bhref\s*=\s*)(["'])(.*?)\2""")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_QUOTED = re.compile(rb"(?:%[0-9A-Fa-f]{2})+")


def read_office(path: Path) -> str:
    """A document's text; sheets and slides one by one.

    Raises:
        DocumentError: kreuzberg is not installed, or cannot read the file.
    """
    try:
        from kreuzberg import (
            ExtractionConfig,
            detect_mime_type_from_path,
            extract_bytes_sync,
            extract_file_sync,
        )
    except ImportError as error:
        missing = MissingPackageError(f"reading {path.suffix} files", "docs", error)
        raise DocumentError(f"{path}: {missing}") from error
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MOST_BYTES:
            raise DocumentError(
                f"{path}: unpacked it has {size} bytes, more than {_MOST_BYTES}; split the document"
            )
    config = ExtractionConfig(use_cache=False)
    try:
        if (data := _mended(path)) is not None:
            found = extract_bytes_sync(data, detect_mime_type_from_path(str(path)), config=config)
        else:
            found = extract_file_sync(str(path), config=config)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a bug in Rust is in Python
            raise
        raise DocumentError(f"{path}: the parser failed ({error}); repair or remove it") from error
    title, text = found.metadata.get("title"), found.content
    if isinstance(title, str):
        text = f"Title: {title}\n\n{text}"
    return text.translate(_MARKUP) if path.suffix.lower() == ".docx" else text


def _mended(path: Path) -> bytes | None:
    """A file without what kreuzberg misreads; None if it reads the file as it is."""
    suffix = path.suffix.lower()
    if suffix in _TEXTS:
        return _behind_mark(path)
    if suffix == ".docx" and zipfile.is_zipfile(path):
        return _repacked(path, ".xml", _spelled)
    if suffix == ".epub" and zipfile.is_zipfile(path):
        return _repacked(path, ".opf", _without_quoting)
    return None


def _repacked(
    path: Path, suffix: str, mend: Callable[[bytes, str, zipfile.ZipFile], bytes]
) -> bytes:
    """An archive whose members with a suffix are mended.

    Args:
        mend: given a member's data and name, and the archive, returns what shall be its data.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w") as copy:
        for member in archive.infolist():
            data = archive.read(member)
            if member.filename.endswith(suffix):
                data = mend(data, member.filename, archive)
            copy.writestr(member.filename, data)
    return made.getvalue()


def _spelled(data: bytes, *_: object) -> bytes:
    """XML with characters for its references, tabs and hyphens, which kreuzberg leaves out of text.

    Those that are markup get their stand-ins, so that no text becomes a tag or ends an attribute.
    """

    def character(found: re.Match[bytes]) -> bytes:
        text = unescape(found[0].decode()) if found[0].startswith(b"&") else ""
        return _STAND_INS.get(text, text).encode()

    if data.startswith(_UTF16):
        return data
    data = _MARK.sub(lambda found: _MARKS[found[1]], data)
    return _REFERENCE.sub(character, data)


def _without_quoting(data: bytes, name: str, archive: zipfile.ZipFile) -> bytes:
    """A book's list of files as they are called in its archive: "chapter%202" is "chapter 2"."""

    def decoded(found: re.Match[bytes]) -> bytes:
        return escape(unquote(found[0].decode())).encode()

    def called(found: re.Match[bytes]) -> bytes:
        begin, mark, href = found.groups()
        if normpath(join(dirname(name), href.decode(errors="replace"))) in archive.NameToInfo:
            return found[0]  # by a maker who quotes the names of the files, too
        return begin + mark + _QUOTED.sub(decoded, href) + mark

    return _HREF.sub(called, data)


def _behind_mark(path: Path) -> bytes | None:
    """What stands behind UTF-8's mark, which kreuzberg takes for text; None without a mark."""
    with path.open("rb") as file:
        mark = file.read(len(codecs.BOM_UTF8))
        return file.read() if mark == codecs.BOM_UTF8 else None
