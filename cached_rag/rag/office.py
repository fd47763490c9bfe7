"""RTF and JSON as text, by the kreuzberg library (extra "docs").

Its parsers are written in Rust; nothing in a document is executed or fetched. https://kreuzberg.dev
"""

from __future__ import annotations

import codecs
from pathlib import Path

from cached_rag.errors import DocumentError, MissingPackageError

SUFFIXES = (".rtf", ".json")


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
