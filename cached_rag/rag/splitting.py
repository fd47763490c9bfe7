"""Documents to chunks of bounded length in tokens. Knows text; the tokenizer is given."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cached_rag.errors import ConfigError
from cached_rag.rag.readers import Document

# What text is split behind, coarse first; last, how sentences end in Chinese and Japanese.
_SENTENCE_END = "[\u3002\uff01\uff1f]"
_SEPARATORS = tuple(map(re.compile, (r"\n\n", r"\n", r"\. ", " ", _SENTENCE_END)))
# No token has so many characters: a text of more has more tokens than it is worth to count.
_LONGEST_TOKEN = 1000

Piece = tuple[str, int]


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, headed by the document's title, and its place (from 0)."""

    source: str
    title: str
    ordinal: int
    text: str


class Splitter:
    """Splits at paragraphs, else lines, else sentences, else words, else anywhere.

    Every chunk begins with its document's title: alone, behind other documents' chunks, it would
    often be unclear what it is about. Time is linear in a document's length.

    Args:
        count_tokens: length of a text in tokens of the model.
        chunk_tokens: most tokens of a chunk, its title aside.
        overlap: tokens that neighbours share; 0 keeps modules distinct.
    """

    def __init__(
        self, count_tokens: Callable[[str], int], chunk_tokens: int = 256, overlap: int = 0
    ) -> None:
        if not chunk_tokens >= 16 or not 0 <= overlap < chunk_tokens:
            raise ConfigError(
                f"chunk_tokens ({chunk_tokens}) must be at least 16 and overlap ({overlap}) smaller"
            )
        self._count_tokens = count_tokens
        self._most, self._overlap = chunk_tokens, overlap

    def split(self, document: Document) -> list[Chunk]:
        """The document's chunks, in order."""
        count = lru_cache(None)(self._count_tokens)  # words come again, and so do lines
        texts = (text.strip() for text in self._split(document.text, 0, count))
        kept = [text for text in texts if text]
        return [
            Chunk(document.source, document.title, ordinal, _headed(document.title, text))
            for ordinal, text in enumerate(kept)
        ]

    def _split(self, text: str, level: int, count: Callable[[str], int]) -> Iterator[str]:
        """A text's chunks: its pieces joined as far as they fit, too long ones split in turn."""
        while level < len(_SEPARATORS) and not _SEPARATORS[level].search(text):
            level += 1
        if level == len(_SEPARATORS):
            yield from self._joined(self._cut(text, count))
            return
        fitting: list[Piece] = []
        for piece in _pieces(text, _SEPARATORS[level]):
            is_countable = len(piece) < self._most * _LONGEST_TOKEN
            if is_countable and (size := count(piece)) < self._most:
                fitting.append((piece, size))
            else:
                yield from self._joined(fitting)
                fitting = []
                yield from self._split(piece, level + 1, count)
        yield from self._joined(fitting)

    def _cut(self, text: str, count: Callable[[str], int]) -> Iterator[Piece]:
        """A text in which nothing separates, in pieces of which about two or more fit a chunk."""
        width = self._most // 2
        waiting = [text[at : at + width] for at in range(0, len(text), width)][::-1]
        while waiting:
            piece = waiting.pop()
            size, half = count(piece), len(piece) // 2
            if size > self._most and half:
                waiting += (piece[half:], piece[:half])
            else:
                yield piece, size

    def _joined(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """Neighbours together, as long as their tokens are at most a chunk's."""
        chunk: deque[Piece] = deque()
        total = 0
        for piece, size in pieces:
            if chunk and total + size > self._most:
                yield "".join(text for text, _ in chunk)
                while total > self._overlap or (total and total + size > self._most):
                    total -= chunk.popleft()[1]
            chunk.append((piece, size))
            total += size
        yield "".join(text for text, _ in chunk)


def _pieces(text: str, separator: re.Pattern[str]) -> list[str]:
    """A text cut behind each separator; nothing is lost."""
    ends = (found.end() for found in separator.finditer(text))
    return [text[a:b] for a, b in pairwise((0, *ends, len(text))) if a < b]


def _headed(title: str, text: str) -> str:
    return text if text.startswith(title) else f"{title}\n\n{text}"
