"""Finds texts in prompts: known chunks, and those that recur.

Known chunks are found by their exact text, then their tokens in the prompt's tokens. A chunk that
is not found is no error: its text is prefilled as any other.

Of texts that recur, applications gain that tell nobody what they retrieve. A prompt is cut into
sentences and lines. Those that an earlier prompt had behind another beginning, one after the other
as there, are a run; a long run is most likely a document that was retrieved again. Control tokens
belong to no run, nor do the marks that applications put around documents. So runs keep inside one
message, if the model's template has control tokens between messages. What stands behind the same
beginning as before is no run: the KV of that beginning serves it. Knows text, offsets and token
ids; knows no KV and no model.
"""

import re
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachetools import LRUCache
from xxhash import xxh3_64, xxh3_64_intdigest

from cached_rag.backends.prompt_text import Span, Tokens
from cached_rag.kv.catalog import MAX_TRIM, ChunkRecord, pack
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import MEAN

# Characters at the beginning of a text by which it is looked up; shorter texts are no chunks.
ANCHOR = 32
# A bound on the time of a search, as documents may be made to slow it down: the characters that it
# may digest. That is a tenth of a second at most, plus a little for each character of the prompt.
# One digest costs as much as reading _DIGEST_COST characters, in addition to its own. An index with
# 300 different lengths behind one anchor needs some 400 for each character of its own texts, so
# all of them are found in a prompt of 150,000 characters.
_ALLOWED = 1 << 26
_ALLOWED_PER_CHARACTER = 64
_DIGEST_COST = 500
# The shortest run that is learned, in tokens; and the longest, as a request may have to wait while
# one is encoded. Longer runs are cut.
SHORTEST, LONGEST = 64, 1024
# How many facts about earlier prompts are remembered; a sentence takes two of them, each some 150
# bytes. That is enough for about eighty prompts of four thousand tokens.
_MOST = 1 << 15
# What stands between documents: the tags of Open WebUI and others, and AnythingLLM's lines.
_MARK = re.compile(
    r"</?(?:sources?|contexts?|documents?|docs?|passages?|chunks?|files?|results?)\b[^<>]{0,500}>"
    r"|\[(?:END )?CONTEXT \d+\]:?",
    re.IGNORECASE,
)
# What stands between a control token and a message's text: the role, or nothing.
_ROLE = re.compile(r"\w{0,32}\s*\n|")
_END = re.compile(r"\n\s*|[.!?][\"')\]]?\s+|[\u3002\uff01\uff1f]")
# How many heads of prompts are kept for comparison, and how many may be learned: every prompt is
# compared with each of those.
_REMEMBERED, _LEARNED = 256, 8


class EncodedAfter(NamedTuple):
    """What stood before a chunk while it was encoded; a `Behind` of the catalog.

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
    def span(self) -> Span:
        """Its characters in the prompt, as `ChunkTable.find` gives them."""
        return self.at, self.at + len(self.text)

    @property
    def first(self) -> int:
        """The slot where the chunk's own first token would stand."""
        return self.begin - self.offset


class ChunkTable:
    """All known chunks, found in a text by their first 32 characters, the anchor.

    No whole text is kept: the anchor, the length and a digest are enough to compare with. One
    thread at a time may change the table, while any number of others search it.
    """

    def __init__(self) -> None:
        self._by_digest: dict[str, ChunkRecord] = {}
        # Ascending lengths of the chunks that begin with the same anchor, and how many have each.
        self._by_anchor: dict[str, tuple[int, ...]] = {}
        self._counts = Counter[tuple[str, int]]()

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
        self._count(chunk, 1)

    def discard(self, chunks: Iterable[ChunkRecord]) -> None:
        """Remove chunks; unknown ones are ignored."""
        for chunk in chunks:
            if self._by_digest.pop(chunk.text_digest, None) is not None:
                self._count(chunk, -1)

    def _count(self, chunk: ChunkRecord, change: int) -> None:
        """Count one chunk more, or less, of its anchor and length."""
        anchor, length = place = (chunk.anchor, chunk.length)
        before = self._counts[place]
        self._counts[place] += change
        if not before:
            self._by_anchor[anchor] = tuple(sorted((*self._by_anchor.get(anchor, ()), length)))
        elif not self._counts[place]:
            del self._counts[place]
            self._by_anchor[anchor] = tuple(n for n in self._by_anchor[anchor] if n != length)
            if not self._by_anchor[anchor]:
                del self._by_anchor[anchor]

    def find(self, text: str, *, overlapping: bool = False) -> Iterator[Match]:
        """Find the chunks in a text: leftmost first, the longest at each place.

        Without overlaps, unless those are asked for.

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
            for length in _up_to(len(text) - begin, known) if known else ():
                spent += length + _DIGEST_COST
                if spent > _ALLOWED + begin * _ALLOWED_PER_CHARACTER:
                    spent -= length + _DIGEST_COST
                    break
                verbatim = text[begin : begin + length]
                if chunk := chunks.get(digest(verbatim)):
                    yield Match(chunk, verbatim, begin)
                    step = 1 if overlapping else length
                    break
            begin += step


def _up_to(room: int, ascending: Sequence[int]) -> Iterator[int]:
    """The lengths up to `room`, longest first."""
    return (ascending[i] for i in range(bisect_right(ascending, room) - 1, -1, -1))


def record_of(text: str, tokens: Tokens) -> ChunkRecord:
    """The record by which a text is found in prompts.

    Args:
        tokens: those of the text alone.
    """
    return ChunkRecord(
        text_digest=digest(text),
        anchor=text[:ANCHOR],
        length=len(text),
        ids=pack(tokens.ids),
        starts=pack(tokens.starts),
    )


def align(match: Match, prompt: Tokens) -> Match | None:
    """Find the tokens of a matched chunk in the prompt's tokens.

    Returns:
        The match with `begin`, `end` and `offset`. None if more tokens than a few at the borders
        differ; the chunk is then prefilled as ordinary text.
    """
    ids, starts = match.chunk.token_ids, match.chunk.token_starts
    last = match.span[1]
    stop = bisect_left(prompt.starts, last)
    for offset in range(min(MAX_TRIM + 1, len(ids))):
        begin = bisect_left(prompt.starts, match.at + starts[offset])
        for missing in range(min(MAX_TRIM + 1, len(ids) - offset)):
            own = ids[offset : len(ids) - missing]
            end = begin + len(own)
            fits = end <= stop and prompt.ends[end - 1] <= last
            if fits and tuple(prompt.ids[begin:end]) == own:
                return replace(match, begin=begin, end=end, offset=offset)
    return None


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common beginning of two texts, or of the tokens of two."""
    pairs = enumerate(zip(first, second, strict=False))
    least = min(len(first), len(second))
    return next((index for index, (mine, its) in pairs if mine != its), least)


@dataclass(frozen=True)
class _Piece:
    """A sentence or a line.

    Attributes:
        begin, end: its characters in the prompt.
        name: a digest of it, without white space around it.
        before: a digest of all of the prompt before it.
        after: a digest of it and the piece right before it; None if there is none.
    """

    begin: int
    end: int
    name: int
    before: int
    after: int | None


class Recurring:
    """What the last prompts of one tenant said, as digests. Safe for several threads."""

    def __init__(self, most: int = _MOST) -> None:
        # By the digest of a piece, or of two neighbours: that of all before it, when last seen.
        self._seen: LRUCache[int, int] = LRUCache(most)
        self._lock = threading.RLock()  # as in `Activity`

    def clear(self) -> None:
        """Forget all prompts."""
        with self._lock:
            self._seen.clear()

    def find(
        self,
        text: str,
        tokens: Tokens,
        controls: Collection[int],
        known: Sequence[Span],
    ) -> list[str]:
        """The runs of a prompt that earlier ones had elsewhere; the prompt is remembered.

        Args:
            tokens: the prompt's.
            controls: ids of control tokens.
            known: characters that belong to known chunks, or to control tokens that are only
                spelled out: a text with these could be the structure of another prompt.
        """
        pieces = list(_pieces(text, _between(text, tokens, controls, known)))
        with self._lock:
            runs = list(self._runs(pieces))
            for piece in pieces:
                for name in (piece.name, piece.after):
                    if name is not None:
                        self._seen[name] = piece.before
        return [found for run in runs for found in _cut(text, tokens, run)]

    def _runs(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
        """Neighbours that recur, and were neighbours before."""
        run: list[_Piece] = []
        for piece in pieces:
            recurs = self._seen.get(piece.name, piece.before) != piece.before
            if run and not (recurs and piece.after in self._seen):
                yield run
                run = []
            if recurs:
                run.append(piece)
        if run:
            yield run


class Heads:
    """The heads of recent prompts, and those that recurred. Safe for several threads.

    Args:
        learned: how many heads may be learned. There is a bound because every prompt is compared
            with each of them.
    """

    def __init__(self, learned: int = _LEARNED) -> None:
        self._room = learned
        self._learned: set[tuple[int, ...]] = set()
        self._seen: LRUCache[tuple[int, ...], tuple[set[str], set[str]]] = LRUCache(_REMEMBERED)
        self._lock = threading.RLock()  # as in `Activity`

    def learn(self, head: tuple[int, ...], chunk: str, rest: str) -> bool:
        """Note what a head stood before.

        Args:
            head: the head's tokens.
            chunk: the digest of the first chunk behind it.
            rest: the digest of what stood behind the last one.

        Returns:
            Whether the head is learned: two chunks and two rests have followed it.
        """
        with self._lock:
            if head in self._learned:
                return True
            chunks, rests = self._seen.setdefault(head, (set(), set()))
            for seen, new in ((chunks, chunk), (rests, rest)):
                if len(seen) < 2:
                    seen.add(new)
            if min(len(chunks), len(rests)) < 2 or len(self._learned) >= self._room:
                return False
            self._learned.add(head)
            return True


def _between(
    text: str, tokens: Tokens, controls: Collection[int], known: Sequence[Span]
) -> Iterator[Span]:
    """The characters of a prompt that may be in a run, as spans."""
    borders = [*known, *(mark.span() for mark in _MARK.finditer(text))]
    for token, begin, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True):
        if token in controls:
            role = _ROLE.match(text, end)
            borders.append((begin, role.end() if role else end))
    done = 0
    for begin, end in (*sorted(borders), (len(text), len(text))):
        if begin > done:
            yield done, begin
        done = max(done, end)


def _pieces(text: str, spans: Iterator[Span]) -> Iterator[_Piece]:
    """The pieces of a prompt, in order."""
    whole, done = xxh3_64(), 0
    for first, last in spans:
        begin, previous = first, None
        ends = (mark.end() for mark in _END.finditer(text, first, last))
        for end in (*ends, last):
            said = text[begin:end].strip()
            if said:
                whole.update(text[done:begin].encode())
                done = begin
                name = xxh3_64_intdigest(said.encode())
                after: int | None = None if previous is None else hash((previous, name))
                yield _Piece(begin, end, name, whole.intdigest(), after)
                previous = name
            begin = end


def _cut(text: str, tokens: Tokens, run: Sequence[_Piece]) -> Iterator[str]:
    """The parts of a run that are long enough and not too long."""
    begins = [bisect_left(tokens.starts, piece.begin) for piece in run]
    ends = [bisect_left(tokens.starts, piece.end) for piece in run]
    at = 0
    while at < len(run):
        upto = max(at + 1, bisect_right(ends, begins[at] + LONGEST))
        if SHORTEST <= ends[upto - 1] - begins[at] <= LONGEST:
            yield text[run[at].begin : run[upto - 1].end].strip()
        at = upto
