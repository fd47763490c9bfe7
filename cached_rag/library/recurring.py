"""Finds texts that recur in prompts, so that applications gain that tell nobody what they retrieve.

A prompt is cut into sentences and lines. Those that an earlier prompt had behind another beginning,
one after the other as there, are a run; a long run is most likely a document that was retrieved
again. Control tokens belong to no run, nor do the marks that applications put around documents. So
runs keep inside one message, if the model's template has control tokens between messages. What
stands behind the same beginning as before is no run: the KV of that beginning serves it. Knows text
and tokens; knows no KV.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cachetools import LRUCache
from xxhash import xxh3_64, xxh3_64_intdigest

from cached_rag.backends.prompt_text import Span, Tokens

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
    """What the last prompts of one tenant said, as digests. Safe for several threads.

    Attributes:
        generation: grows with each `clear`.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most, self.generation = most, 0
        # By the digest of a piece, or of two neighbours: that of all before it, when last seen.
        self._seen: dict[int, int] = {}
        self._lock = threading.RLock()  # as in `WriteBack`

    def __len__(self) -> int:
        return len(self._seen)

    def clear(self) -> None:
        """Forget all prompts."""
        with self._lock:
            self._seen.clear()
            self.generation += 1

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
                self._note(piece)
            while len(self._seen) > self._most:
                del self._seen[next(iter(self._seen))]
        return [found for run in runs for found in _cut(text, tokens, run)]

    def _note(self, piece: _Piece) -> None:
        for name in (piece.name, piece.after):
            if name is not None:
                self._seen.pop(name, None)  # the latest are last
                self._seen[name] = piece.before

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
        remembered: how many heads of recent prompts are kept for comparison.
    """

    def __init__(self, learned: int = _LEARNED, remembered: int = _REMEMBERED) -> None:
        self._room = learned
        self._learned: set[tuple[int, ...]] = set()
        self._seen: LRUCache[tuple[int, ...], tuple[set[str], set[str]]] = LRUCache(remembered)
        self._lock = threading.RLock()  # as in `WriteBack`

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
