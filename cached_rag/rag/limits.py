"""How much of the machine a document may take while it is read, and how long its text may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TypeVar

from cached_rag.errors import ConfigError, DocumentError

_Piece = TypeVar("_Piece")
MAX_BYTES = 50 << 20
MAX_CHARACTERS = 10_000_000
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
