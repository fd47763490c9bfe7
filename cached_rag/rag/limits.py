"""Documents are nobody's friends: how much one may take while it is read, and which file it is.

The file that was found is opened, and no other one: somebody may put a link in its place meanwhile.
What parsers get is a copy, as they open a file by its name, and some do so several times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from cached_rag.errors import ConfigError, DocumentError
from cached_rag.rag.document import shown

_Piece = TypeVar("_Piece")
MAX_BYTES = 50 << 20
MAX_CHARACTERS = 10_000_000
# Through no link, and without waiting for whoever would write into a pipe. Windows lacks these.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)
_most = ContextVar("most characters of the text that is being read", default=MAX_CHARACTERS)


@dataclass(frozen=True)
class DocumentLimits:
    """Limits on reading one document. One beyond them is skipped with its reason.

    Attributes:
        max_document_bytes: most bytes of its file.
        parse_seconds: most seconds that reading it may take; None for any.
        parse_memory_bytes: most memory of the process that reads it, parser included; None for any.
            With neither of the two, documents are read in the process that asks.
        max_characters: most characters of its text, what is known of its parts included. A small
            file may hold a long text: a table whose columns have long names, or one page that is
            shown a thousand times.
    """

    max_document_bytes: int = MAX_BYTES
    parse_seconds: float | None = 300.0
    parse_memory_bytes: int | None = 2 << 30
    max_characters: int = MAX_CHARACTERS

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0 < value < 1 << 62:
                raise ConfigError(f"{one.name} is to be positive, not {value}")
            if value is None and one.name.startswith("max"):
                raise ConfigError(f"{one.name} is a number; give a large one for any size")

    @property
    def need_a_process(self) -> bool:
        """Whether they can be kept only where another process reads."""
        return self.parse_seconds is not None or self.parse_memory_bytes is not None


def too_long(max_characters: int) -> DocumentError:
    """What is said of a document with too much text."""
    return DocumentError(
        f"its text has more than {max_characters} characters; split the file, or raise the limit "
        "(max_characters=)"
    )


@contextmanager
def text_limit(max_characters: int) -> Iterator[None]:
    """Has `limited` hold this limit."""
    token = _most.set(max_characters)
    try:
        yield
    finally:
        _most.reset(token)


def limited(pieces: Iterable[_Piece], length: Callable[[_Piece], int]) -> Iterator[_Piece]:
    """Pieces of a document's text, as they are made, up to the limit on its text.

    Args:
        length: how many characters a piece has.

    Raises:
        DocumentError: there are more, of which none is made.
    """
    most = left = _most.get()
    for piece in pieces:
        left -= length(piece)
        if left < 0:
            raise too_long(most)
        yield piece


@contextmanager
def private_copy(path: Path, inside: Path, max_bytes: int) -> Iterator[Path]:
    """A copy of a file, of its name, that lasts as long as the context does.

    Args:
        inside: the file itself, or a folder in which it lies; with all links followed.

    Raises:
        DocumentError: the path leads elsewhere, to what is no file, or to a larger one.
        OSError: it cannot be read.
    """
    with TemporaryDirectory(prefix="cached-rag-") as folder:
        copy = Path(folder, path.name)
        with open(_descriptor(path, inside), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DocumentError(f"{shown(path)}: is no file, but a folder, pipe or device")
            data = b"" if found.st_size > max_bytes else file.read(max_bytes + 1)
            size = max(found.st_size, len(data))
        if size > max_bytes:
            raise DocumentError(
                f"{shown(path)}: {size} bytes exceed {max_bytes}; split the file, or raise the "
                "limit (max_document_bytes=, --max-document-bytes)"
            )
        copy.write_bytes(data)
        yield copy


def _descriptor(path: Path, inside: Path) -> int:
    """The file, opened where it really lies: from folder to folder, none of which is a link.

    Raises:
        DocumentError: it does not lie in `inside`.
    """
    target = path.resolve(strict=True)
    is_found = target == inside or (
        target.is_relative_to(inside) and target.suffix.lower() == path.suffix.lower()
    )
    if not is_found:
        raise DocumentError(
            f"{shown(path)}: leads out of {shown(inside)}, or to a file of another kind; put the "
            "file there, and no link"
        )
    if os.open not in os.supports_dir_fd:  # Windows
        return _looked_at_again(os.open(target, _FLAGS), path, target)
    start = inside.parent if target == inside else inside
    here = os.open(start, os.O_RDONLY)
    for name in target.relative_to(start).parts:
        try:
            below = os.open(name, _FLAGS, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _looked_at_again(descriptor: int, path: Path, target: Path) -> int:
    if path.resolve() == target and os.path.samestat(os.fstat(descriptor), os.lstat(target)):
        return descriptor
    os.close(descriptor)
    raise DocumentError(f"{shown(path)}: another file was put in its place; read it again")
