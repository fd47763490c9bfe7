"""What the catalog's rows stand for, and how numbers are packed in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkRecord:
    """A text that is a module.

    Attributes:
        text_digest: digest of the text.
        anchor: the text's first 32 characters.
        length: the text's length in characters.
        token_ids: the text's tokens, when it is tokenised alone.
        token_starts: for each token, the character of the text at which it begins.
    """

    text_digest: str
    anchor: str
    length: int
    token_ids: tuple[int, ...]
    token_starts: tuple[int, ...]


@dataclass(frozen=True)
class Maker:
    """A model that made KV, in one dtype.

    Attributes:
        model: its fingerprint.
        name, dtype: for people; empty where only the fingerprint is known.
    """

    model: str
    name: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.dtype}" if self.name else "another model or dtype"


def pack(numbers: Sequence[int]) -> bytes:
    """Numbers as a blob of 32-bit integers."""
    return array("i", numbers).tobytes()


def unpack(data: object) -> tuple[int, ...]:
    """What `pack` has packed."""
    numbers = array("i")
    numbers.frombytes(bytes(data))  # type: ignore[call-overload]
    return tuple(numbers)
