"""Finds known chunks in a rendered prompt by their exact text, then their tokens in its tokens.

A chunk that is not found is no error: its text is prefilled as any other. Knows text, offsets and
token ids; knows no KV and no model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cached_rag.backends.prompt_text import Tokens
from cached_rag.kv.catalog import ChunkRecord
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import MEAN

# Characters at the beginning of a text by which it is looked up; shorter texts are no chunks.
ANCHOR = 32
# The tokens at a chunk's borders may differ in a prompt, because characters merge with those of the
# neighbours. So many tokens at each end may be missing in a match.
MAX_TRIM = 4
# A bound on the time of a search, as documents may be made to slow it down: the characters that it
# may digest. That is a tenth of a second at most, plus a little for each character of the prompt.
# One digest costs as much as reading _DIGEST_COST characters, in addition to its own. An index with
# 300 different lengths behind one anchor needs some 400 for each character of its own texts, so
# all of them are found in a prompt of 150,000 characters.
_ALLOWED = 1 << 26
_ALLOWED_PER_CHARACTER = 64
_DIGEST_COST = 500


@dataclass(frozen=True)
class EncodedAfter:
    """What stood before a chunk while it was encoded.

    Attributes:
        prefix_ids: tokens of the prefix, from position 0.
        context: name of the context between prefix and chunk; empty for none.
    """

    prefix_ids: tuple[int, ...]
    context: str = ""

    @property
    def rank(self) -> int:
        """The higher, the nearer to full prefill: none, a context, the mean of several."""
        return bool(self.context) + self.context.startswith(MEAN)


# What a prompt has computed for a chunk, behind whatever stood before it there (`plan.py`). Any
# other encoding is preferred to it.
HARVESTED = EncodedAfter((), "harvest")


@dataclass(frozen=True)
class Match:
    """A chunk that was found in a prompt.

    `ChunkTable.find` fills in the first three attributes, `align` the tokens.

    Attributes:
        chunk: the record of the chunk.
        text: the chunk's text, as it stands in the prompt.
        at: index of its first character in the prompt.
        begin, end: tokens of the prompt (`end` exclusive) that are the chunk's own tokens. Tokens
            at the chunk's borders that merged with neighbours are not among them.
        offset: which of the chunk's tokens the one at `begin` is.
        encoded_after: what stood before the chunk when the KV that is used was encoded; None if
            the chunk has no KV.
        is_part: only these tokens of the chunk are in the prompt (`handed_over.py`). `text` is the
            whole chunk's then, and `at` means nothing.
    """

    chunk: ChunkRecord
    text: str
    at: int
    begin: int = 0
    end: int = 0
    offset: int = 0
    encoded_after: EncodedAfter | None = None
    is_part: bool = False

    @property
    def first(self) -> int:
        """The slot where the chunk's own first token would stand."""
        return self.begin - self.offset


def inner_ids(chunk: ChunkRecord) -> tuple[int, ...]:
    """The tokens of a chunk without its borders: every prompt that contains it has them.

    Of a short one a quarter is taken off at each end, as what is left must be told from others.
    """
    count = len(chunk.token_ids)
    trim = MAX_TRIM if count > 2 * MAX_TRIM else max(1, count // 4)
    return chunk.token_ids[trim : count - trim] or chunk.token_ids


class ChunkTable:
    """All known chunks, found in a text by their first 32 characters, the anchor.

    No whole text is kept: the anchor, the length and a digest are enough to compare with. One
    thread at a time may change the table, while any number of others search it.
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

    def add(self, chunk: ChunkRecord) -> None:
        """Add a chunk; one that is known already changes nothing."""
        if chunk.text_digest in self._by_digest:
            return
        self._by_digest[chunk.text_digest] = chunk
        self._by_anchor.setdefault(chunk.anchor, _Lengths()).add(chunk.length)

    def discard(self, chunks: Iterable[ChunkRecord]) -> None:
        """Remove chunks; unknown ones are ignored."""
        for chunk in chunks:
            if self._by_digest.pop(chunk.text_digest, None) is not None:
                lengths = self._by_anchor[chunk.anchor]
                lengths.discard(chunk.length)
                if not lengths:
                    del self._by_anchor[chunk.anchor]

    def find(self, text: str) -> Iterator[Match]:
        """Find the chunks in a text: leftmost first, the longest at each place, without overlaps.

        The time is linear in the text's length. Every character costs a look-up of an anchor. If
        one is found, a digest is computed for each length of its chunks. All digests together
        have a bound, which texts that were made to begin alike can use up; chunks that are not
        found because of it are prefilled as ordinary text.
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
    """The lengths, in characters, of the chunks that begin with the same anchor."""

    __slots__ = ("_ascending", "_counts")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._ascending: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._ascending)

    def up_to(self, room: int) -> Iterator[int]:
        """The lengths up to `room`, longest first."""
        ascending = self._ascending
        return (ascending[i] for i in range(bisect_right(ascending, room) - 1, -1, -1))

    def add(self, length: int) -> None:
        """Count one more chunk of this length."""
        self._counts[length] += 1
        if self._counts[length] == 1:
            self._ascending = tuple(sorted(self._counts))

    def discard(self, length: int) -> None:
        """Count one chunk less of this length."""
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length]
            self._ascending = tuple(sorted(self._counts))


def record_of(text: str, tokens: Tokens) -> ChunkRecord:
    """The record by which a text is found in prompts.

    Args:
        tokens: those of the text alone.
    """
    return ChunkRecord(
        text_digest=digest(text),
        anchor=text[:ANCHOR],
        length=len(text),
        token_ids=tuple(tokens.ids),
        token_starts=tuple(tokens.starts),
    )


def align(match: Match, prompt: Tokens) -> Match | None:
    """Find the tokens of a matched chunk in the prompt's tokens.

    Returns:
        The match with `begin`, `end` and `offset`. None if more tokens than a few at the borders
        differ; the chunk is then prefilled as ordinary text.
    """
    if match.is_part:
        return match
    ids, starts = match.chunk.token_ids, match.chunk.token_starts
    last = match.at + len(match.text)
    stop = bisect_left(prompt.starts, last)
    for offset in range(min(MAX_TRIM + 1, len(ids))):
        begin = bisect_left(prompt.starts, match.at + starts[offset])
        length = min(len(ids) - offset, stop - begin)
        while length and (
            prompt.ends[begin + length - 1] > last
            or prompt.ids[begin + length - 1] != ids[offset + length - 1]
        ):
            length -= 1
            if len(ids) - offset - length > MAX_TRIM:
                break
        missing = len(ids) - offset - length
        if missing > MAX_TRIM or not length:
            continue
        if tuple(prompt.ids[begin : begin + length]) == ids[offset : offset + length]:
            return replace(match, begin=begin, end=begin + length, offset=offset)
    return None


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common beginning of two texts, or of the tokens of two."""
    pairs = enumerate(zip(first, second, strict=False))
    least = min(len(first), len(second))
    return next((index for index, (mine, its) in pairs if mine != its), least)
