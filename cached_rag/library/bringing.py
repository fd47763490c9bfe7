"""Brings KV that a prompt can use, and this machine lacks, from the remote tier into memory.

That takes one round trip where the remote tier has the best encoding of every chunk, and three at
most. A remote tier that fails costs a note, and its KV is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cached_rag.errors import StoreError
from cached_rag.kv.store.remote.tier import RemoteTier
from cached_rag.library.encodings import Encodings
from cached_rag.library.matching import EncodedAfter, Match
from cached_rag.library.shelf import Shelf, Source

# Of fewer tokens, such as a prompt's head, nobody needs to know that they are computed.
_WORTH_A_NOTE = 64
# Given a number of tokens, says why their KV is not to be brought; empty if it is.
Refuses = Callable[[int], str]


@dataclass(frozen=True)
class Wanted:
    """Something whose KV is wanted: its encodings, best first, one of which is enough."""

    sources: tuple[Source, ...]

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return len(self.sources[0][1])


def wanted(encodings: Encodings, matches: Sequence[Match]) -> list[Wanted]:
    """What a prompt can use: KV of its beginning and of its chunks."""
    alone = EncodedAfter(())
    head = tuple((alone, prefix_ids) for prefix_ids in encodings.heads if prefix_ids)
    found = [Wanted(head)] if head else []
    for match in matches:
        ids = match.chunk.token_ids
        found.append(Wanted(tuple((behind, ids) for behind in encodings.of_chunk(match))))
    return found


def bring(shelf: Shelf, wanted: Sequence[Wanted], refuses: Refuses) -> list[str]:
    """Bring what of this is not on this machine, if that is worth it; returns notes for the user.

    Afterwards the KV is in memory, if there is room.
    """
    remote = shelf.remote
    if remote is None:
        return []
    missing = [one for one in wanted if not any(shelf.holds(*source) for source in one.sources)]
    if not missing:
        return []
    tokens = sum(one.tokens for one in missing)
    if reason := refuses(tokens):
        return [reason] if tokens >= _WORTH_A_NOTE else []
    try:
        return _brought(shelf, remote, missing)
    except StoreError as error:
        return [str(error)]


def _brought(shelf: Shelf, remote: RemoteTier, missing: Sequence[Wanted]) -> list[str]:
    best = {shelf.key(*one.sources[0]): one for one in missing}
    notes, found = _fetched(shelf, remote, {key: one.sources[0] for key, one in best.items()})
    others = {
        shelf.key(*source): source
        for key, one in best.items()
        if key not in found
        for source in one.sources[1:]
    }
    held = remote.holds(shelf.namespace, others) if others else set()
    if held:
        chosen: dict[tuple[int, ...], str] = {}
        for key, (_, ids) in others.items():  # in order, the best first
            if key in held:
                chosen.setdefault(ids, key)
        notes += _fetched(shelf, remote, {key: others[key] for key in chosen.values()})[0]
    return notes


def _fetched(
    shelf: Shelf, remote: RemoteTier, sources: dict[str, Source]
) -> tuple[list[str], set[str]]:
    """Bring KV by its keys: what was wrong with some, and the keys of what came."""
    deletions = shelf.deletions
    answer = remote.fetch(shelf.namespace, {key: ids for key, (_, ids) in sources.items()})
    shelf.take_over(answer.kv, deletions)
    return list(answer.problems), set(answer.kv)
