"""Office documents, tables, books and notebooks as text, by the kreuzberg library (extra "docs").

Its parsers are written in Rust; nothing in a document is executed or fetched. https://kreuzberg.dev
"""

from __future__ import annotations

import codecs
import zipfile
from pathlib import Path

from cached_rag.errors import DocumentError, MissingPackageError

_TEXTS = (".csv", ".tsv", ".json", ".ipynb")
SUFFIXES = (".docx", ".pptx", ".xlsx", ".odt", ".ods", ".odp", ".rtf", ".epub", *_TEXTS)
# Most documents are archives, and a small one may hold a large document.
_MOST_BYTES = 200 << 20


def read_office(path: Path) -> str:
    """A document's text; tables as lines of "column: value", sheets and slides one by one.

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
        if (text := _behind_mark(path)) is not None:
            found = extract_bytes_sync(text, detect_mime_type_from_path(str(path)), config=config)
        else:
            found = extract_file_sync(str(path), config=config)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a bug in Rust is in Python
            raise
        raise DocumentError(f"{path}: the parser failed ({error}); repair or remove it") from error
    title = found.metadata.get("title")
    return f"Title: {title}\n\n{found.content}" if isinstance(title, str) else found.content


def _behind_mark(path: Path) -> bytes | None:
    """What stands behind UTF-8's mark, which kreuzberg takes for text; None without a mark."""
    if path.suffix.lower() not in _TEXTS:
        return None
    with path.open("rb") as file:
        mark = file.read(len(codecs.BOM_UTF8))
        return file.read() if mark == codecs.BOM_UTF8 else None
