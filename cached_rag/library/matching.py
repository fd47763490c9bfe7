"""Finds known chunks in a rendered prompt by exact text, and their tokens in its tokens.

Knows text, offsets and ids; knows no KV and no model. No match is never an error: it means
ordinary prefill.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cached_rag.backends.tokenizer import Tokens
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store.catalog import ChunkRecord

ANCHOR = 32
# A neighbour's characters can merge with a module's outermost tokens, not further in.
_MAX_TRIM = 4
# What a search may digest, in characters: at most a tenth of a second, plus a little for each
# character of the prompt. A digest costs as much as so many characters before it reads the first.
# An index with 300 lengths behind one anchor needs some 400 for each character of its own texts
# (it has them all in a prompt of 150,000).
_ALLOWED = 1 << 26
_ALLOWED_PER_CHARACTER = 64
_DIGEST_COST = 500


@dataclass(frozen=True)
class EncodedAfter:
    """What chunks were encoded after: a prefix, and the name of a context that followed it."""

    prefix_ids: tuple[int, ...]
    context: str = ""


@dataclass(frozen=True)
class Match:
    """A chunk in a prompt: by its text as `find` gives it, by its tokens once they are aligned.

    Attributes:
        text: as it stands in the prompt.
        at: the character where it begins.
        begin, end: the prompt's tokens (`end` exclusive) that are the chunk's own, from its token
            `offset` on; the others, at its borders, merged with their neighbours.
        encoded_after: what the KV used for it was encoded after; None if it has none.
    """

    chunk: ChunkRecord
    text: str
    at: int
    begin: int = 0
    end: int = 0
    offset: int = 0
    encoded_after: EncodedAfter | None = None

    @property
    def first(self) -> int:
        """Where the chunk's first token would stand."""
        return self.begin - self.offset


def inner_ids(module: ChunkRecord) -> tuple[int, ...]:
    """A module's tokens that any prompt has that contains it."""
    return module.token_ids[_MAX_TRIM:-_MAX_TRIM] or module.token_ids


class ChunkTable:
    """All known modules, found by their first 32 characters.

    Keeps no text: an anchor, a length and a digest say what to compare with. One thread at a time
    may change it, while any number of others read; a search that has begun goes on with what it
    began with.
    """

    def __init__(self) -> None:
        self._by_anchor: dict[str, _Lengths] = {}
        self._by_digest: dict[str, ChunkRecord] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[ChunkRecord]:
        return iter(list(self._by_digest.values()))

    def get(self, text: str) -> ChunkRecord | None:
        """The record of exactly this text."""
        return self.by_digest(digest(text))

    def by_digest(self, text_digest: str) -> ChunkRecord | None:
        """The record of the text that has this digest."""
        return self._by_digest.get(text_digest)

    def add(self, module: ChunkRecord) -> None:
        """Know one more module; one that is known already changes nothing."""
        if module.text_digest in self._by_digest:
            return
        self._by_digest[module.text_digest] = module
        self._by_anchor.setdefault(module.anchor, _Lengths()).add(module.length)

    def discard(self, modules: Iterable[ChunkRecord]) -> None:
        """Forget some."""
        for module in modules:
            if self._by_digest.pop(module.text_digest, None) is not None:
                lengths = self._by_anchor[module.anchor]
                lengths.discard(module.length)
                if not lengths:
                    del self._by_anchor[module.anchor]

    def find(self, text: str) -> Iterator[Match]:
        """Modules in `text`, leftmost first, the longest at each place, without overlaps.

        Linear in the text: one dictionary look-up a character, and where an anchor hits a digest
        for each length that modules with it have, as long as what all digests have cost stays
        within a constant and so much a character. Texts made to begin alike can use that up;
        what is then not found is prefilled as any text.
        """
        begin, last, spent = 0, len(text) - ANCHOR, 0
        anchors, chunks = self._by_anchor, self._by_digest
        while begin <= last:
            known = anchors.get(text[begin : begin + ANCHOR])
            step = 1
            for length in known.up_to(len(text) - begin) if known else ():
                spent += length + _DIGEST_COST
                if spent > _ALLOWED + begin * _ALLOWED_PER_CHARACTER:
                    spent -= length + _DIGEST_COST
                    break
                verbatim = text[begin : begin + length]
                if chunk := chunks.get(digest(verbatim)):
                    yield Match(chunk, verbatim, begin)
                    step = length
                    break
            begin += step


class _Lengths:
    """The lengths of the modules that begin with one anchor, each once."""

    __slots__ = ("_ascending", "_counts")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._ascending: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._ascending)

    def up_to(self, room: int) -> Iterator[int]:
        """Those that are no more than `room`, the longest first."""
        ascending = self._ascending
        return (ascending[i] for i in range(bisect_right(ascending, room) - 1, -1, -1))

    def add(self, length: int) -> None:
        """One more module has it."""
        self._counts[length] += 1
        if self._counts[length] == 1:
            self._ascending = tuple(sorted(self._counts))

    def discard(self, length: int) -> None:
        """One module less has it."""
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length]
            self._ascending = tuple(sorted(self._counts))


def record_of(text: str, tokens: Tokens) -> ChunkRecord:
    """The record by which a text is found; `tokens` are its own, tokenised by itself."""
    return ChunkRecord(
        text_digest=digest(text),
        anchor=text[:ANCHOR],
        length=len(text),
        token_ids=tuple(tokens.ids),
        token_starts=tuple(tokens.starts),
    )


def align(match: Match, prompt: Tokens) -> Match | None:
    """A match with the longest run of the prompt's tokens in it that are the chunk's own.

    Returns:
        None if more than a few outermost tokens differ (the chunk then is prefilled as text).
    """
    ids, starts = match.chunk.token_ids, match.chunk.token_starts
    last = match.at + len(match.text)
    stop = bisect_left(prompt.starts, last)
    for offset in range(min(_MAX_TRIM + 1, len(ids))):
        begin = bisect_left(prompt.starts, match.at + starts[offset])
        length = min(len(ids) - offset, stop - begin)
        while length and (
            prompt.ends[begin + length - 1] > last
            or prompt.ids[begin + length - 1] != ids[offset + length - 1]
        ):
            length -= 1
            if len(ids) - offset - length > _MAX_TRIM:
                break
        missing = len(ids) - offset - length
        if missing > _MAX_TRIM or not length:
            continue
        if tuple(prompt.ids[begin : begin + length]) == ids[offset : offset + length]:
            return replace(match, begin=begin, end=begin + length, offset=offset)
    return None
