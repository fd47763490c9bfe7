"""Decides which tokens of a prompt come from which cached KV.

The prompt's beginning is reused exactly: the longest known prefix, and the chunk right behind it,
if it was encoded behind this prefix and nothing else. All other chunks are reused approximately,
where there is no better KV also those that were encoded behind the head of another prompt.
The rest is computed, and so is the prompt's last token in any case. Knows tokens and the library;
computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cached_rag.backends.prompt_text import Tokens
from cached_rag.kv.buffer import Change, LayerSource, ModuleKV
from cached_rag.kv.catalog import MAX_TRIM
from cached_rag.library.encoder import Encoder
from cached_rag.library.library import Library
from cached_rag.library.matching import HARVESTED, EncodedAfter, Match, shared
from cached_rag.library.sequences import Sequences, common
from cached_rag.library.shelf import HARVEST, KEPT, Origin, Wanted
from cached_rag.methods import Layout, Takes

# The last tokens of a known prefix may differ in a prompt, where they merged with what follows.
_HEAD_SLACK = 4
# How many encodings behind other heads are tried for a chunk: each try is a look-up in the store,
# and a client may make any number of heads known.
_MOST_OTHERS = 4
# A beginning of fewer tokens is computed, unless an exact chunk stands behind it: reusing it saves
# nothing, and its KV was rounded otherwise, by which near ties may fall otherwise.
_SHORTEST_HEAD = 8


@dataclass(frozen=True)
class Placement:
    """Cached KV that is used for some tokens of a prompt.

    Attributes:
        begin: the first of these tokens.
        kv: in memory, or a source that is read layer by layer.
        is_exact: no method recomputes it. It is what full prefill would compute, or was repaired
            for an earlier prompt.
        is_chunk: it counts as a chunk that was hit; False for KV of the prompt's beginning.
        source: (what the KV was encoded after, its token ids), by which the library finds it; None
            if it is not the library's.
        origin: where the KV was when it was planned.
        is_settled: see `Layout.settled`.
        name: of the module that the tokens are, in a prompt of a schema; else empty.
    """

    begin: int
    kv: LayerSource
    is_exact: bool
    is_chunk: bool = True
    source: tuple[EncodedAfter, tuple[int, ...]] | None = None
    origin: Origin = KEPT
    is_settled: bool = False
    name: str = ""

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.begin + self.kv.seq_len

    def after(self, slot: int) -> Placement:
        """The part of it from token `slot` on; it must end later than that."""
        if self.begin >= slot:
            return self
        return replace(self, begin=slot, kv=self.kv.slice(slot - self.begin, self.kv.seq_len))


@dataclass(frozen=True)
class Plan:
    """Which tokens of a prompt come from which KV. All others are computed.

    Attributes:
        placements: in ascending order, without overlaps.
        matches: the known chunks that the prompt contains, with and without KV.
        num_tokens: number of the prompt's tokens.
        chunks: (digest, token after the last) of each chunk whose KV is used or computed, in order.
        positions: of the tokens; None if token i stands at position i.
        looks_for_kv: chunks without KV are those that have none; else no KV was asked for.
        has_strays: it contains a known chunk whose tokens differ there, so it cannot be told where
            KV of the chunk is, should it be forgotten.
    """

    placements: tuple[Placement, ...]
    matches: tuple[Match, ...]
    num_tokens: int
    chunks: tuple[tuple[str, int], ...] = ()
    positions: tuple[int, ...] | None = None
    looks_for_kv: bool = True
    has_strays: bool = False

    @property
    def length(self) -> int:
        """The number of positions from 0 to the last token's."""
        return self.positions[-1] + 1 if self.positions else self.num_tokens

    def delta(self, place: Placement) -> int:
        """By how many positions a placement's keys have to be moved."""
        at = place.begin if self.positions is None else self.positions[place.begin]
        return at - place.kv.start

    @property
    def missed(self) -> tuple[Match, ...]:
        """Chunks in the prompt that have no KV."""
        return tuple(match for match in self.matches if match.encoded_after is None)

    @property
    def harvested(self) -> tuple[Match, ...]:
        """Chunks that have the KV which an earlier prompt computed for them."""
        return tuple(match for match in self.matches if match.encoded_after == HARVESTED)

    def taking(self, what: Takes) -> Plan:
        """The plan with only that cached KV that a method takes."""
        if what is Takes.NOTHING:
            return replace(self, placements=(), positions=None, looks_for_kv=False)
        if what is Takes.ALL:
            return self
        exact = tuple(place for place in self.placements if place.is_exact)
        return replace(self, placements=exact)

    @property
    def changes(self) -> Iterator[tuple[Placement, Change]]:
        """Of each chunk of which it is known, what it does to states."""
        for place in self.placements:
            if (change := place.kv.change) is not None:
                yield place, change

    @property
    def composed(self) -> Plan:
        """The plan with only those chunks of which it is known what they do to states."""
        known = tuple(replace(place, is_exact=False) for place, _ in self.changes)
        return replace(self, placements=known)

    @property
    def exact_end(self) -> int:
        """How many tokens, from the first, have exact KV without a gap."""
        end = 0
        for place in self.placements:
            if place.begin > end or not place.is_exact:
                break
            end = place.end
        return end

    @property
    def is_exact(self) -> bool:
        """Whether all KV is what full prefill would compute."""
        return all(place.is_exact for place in self.placements)

    def harvested_from(self, slot: int) -> int:
        """How many placements that end behind a slot have what an earlier prompt computed."""
        ends = (place.end for place in self.placements if place.origin == HARVEST)
        return sum(end > slot for end in ends)

    @property
    def num_chunks(self) -> int:
        """The number of placements that are chunks."""
        return sum(place.is_chunk for place in self.placements)

    def starting_from(self, pieces: Sequence[ModuleKV]) -> Plan:
        """The plan with its beginning replaced by KV that another prompt has computed.

        Args:
            pieces: one behind the other, the first at token 0; empty changes nothing.
        """
        if not pieces:
            return self
        end = pieces[-1].start + pieces[-1].seq_len
        ahead = tuple(Placement(kv.start, kv, is_exact=True, is_chunk=False) for kv in pieces)
        later = (place.after(end) for place in self.placements if place.end > end)
        return replace(self, placements=(*ahead, *later))

    def layout(
        self,
        num_layers: int,
        ids: torch.Tensor | None = None,
        first_attending: int = 0,
        num_weights: float = math.inf,
    ) -> Layout:
        """The plan as masks over the prompt's tokens, for the methods; see `Layout`."""
        fresh = torch.ones(self.num_tokens, dtype=torch.bool)
        exact = torch.zeros(self.num_tokens, dtype=torch.bool)
        for place in self.placements:
            fresh[place.begin : place.end] = False
            if place.is_exact:
                exact[place.begin : place.end] = True
        approximate = [place for place in self.placements if not place.is_exact]
        spans = tuple((place.begin, place.end) for place in approximate)
        settled = tuple((place.begin, place.end) for place in approximate if place.is_settled)
        tokens = torch.empty(0, dtype=torch.int64) if ids is None else ids
        return Layout(
            fresh, exact, spans, num_layers, settled, tokens, first_attending, num_weights
        )


@dataclass(frozen=True)
class Encodings:
    """The encodings that serve one prompt.

    Attributes:
        ids: the prompt's tokens.
        heads: the known prefixes that it begins with, the longest first.
        usable: what its chunks may have been encoded behind, best first.
    """

    ids: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    usable: tuple[EncodedAfter, ...]

    @classmethod
    def of(cls, encoder: Encoder, ids: tuple[int, ...]) -> Encodings:
        """Those of a prompt."""
        known = encoder.library.encoded_after()
        heads = [one for one in known if is_before(one.prefix_ids, ids)]
        usable = tuple(_ranked(known, heads, encoder.tokenization.sink_ids))
        return cls(ids, tuple(one.prefix_ids for one in heads), usable)

    def is_in_place(self, behind: EncodedAfter, match: Match) -> bool:
        """Whether exactly this stands before a chunk here: KV that was encoded behind it is exact.

        Compares no more than it must: a prompt may have thousands of chunks.
        """
        length = len(behind.prefix_ids)
        return (
            length == match.begin and not behind.context and behind.prefix_ids == self.ids[:length]
        )

    def of_chunk(self, match: Match) -> list[EncodedAfter]:
        """What a chunk may have been encoded behind, best first."""
        first = [] if match.offset else [b for b in self.usable if self.is_in_place(b, match)]
        return [*first[:1], *self.usable]

    def wanted(self, matches: Sequence[Match]) -> list[Wanted]:
        """What the prompt can use: KV of its beginning and of its chunks."""
        alone = EncodedAfter(())
        head = [(alone, prefix_ids) for prefix_ids in self.heads if prefix_ids]
        found: list[Wanted] = [head] if head else []
        for match in matches:
            ids = match.chunk.token_ids
            found.append([(behind, ids) for behind in self.of_chunk(match)])
        return found


def _ranked(
    known: Sequence[EncodedAfter], heads: Sequence[EncodedAfter], sink_ids: tuple[int, ...]
) -> list[EncodedAfter]:
    """All that a prompt's chunks may have been encoded behind, best first.

    That is first a head that the prompt begins with; then nothing, as such KV serves anywhere, also
    in prompts without BOS; then the heads of other prompts. A context, such as the primer, counts
    more than the head (docs/quality.md).

    Args:
        known: all that chunks were encoded behind, as `Library.encoded_after` has it.
        heads: those of `known` that the prompt begins with.
        sink_ids: the tokens before chunks that were encoded without a prefix.
    """
    none = (sink_ids, ())
    own = [one for one in heads if one.prefix_ids not in none]
    alone = [one for one in known if one.prefix_ids in none]
    alone += [one for one in map(EncodedAfter, none) if one not in alone]
    others = [one for one in known if one not in own and one not in alone]
    others.sort(key=lambda one: one.rank, reverse=True)
    return [*own, *sorted((*alone, *others[:_MOST_OTHERS]), key=lambda b: b.rank, reverse=True)]


def is_before(prefix_ids: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether a prompt begins with a prefix; its last tokens may have merged with what follows."""
    return shared(prefix_ids, ids) >= max(1, len(prefix_ids) - _HEAD_SLACK)


def make_plan(
    encoder: Encoder,
    tokens: Tokens,
    matches: Sequence[Match],
    kept: Sequences | None,
    *,
    lazy: bool,
) -> Plan:
    """Choose the best KV for all chunks in a prompt, and for its beginning.

    Args:
        tokens: the prompt's.
        matches: the chunks that were found in the prompt, and aligned with its tokens.
        kept: finished prompts, of which chunks without KV are taken; None to take none.
        lazy: KV on disk is only opened, and read when it is used.
    """
    ids, library = tuple(tokens.ids), encoder.library
    encodings = Encodings.of(encoder, ids)
    placements = _head(library, encodings.heads, ids)
    found, chunks = [], []
    for match in matches:
        behinds = encodings.of_chunk(match)
        best = library.shelf.best_encoding(behinds, match.chunk.token_ids, lazy=lazy)
        if best is None and kept is not None:
            match, best = _harvested(kept, library.namespace, ids, match) or (match, None)
        if best is None:
            found.append(match)
            chunks.append((match.chunk.text_digest, match.end))
            continue
        encoded_after, kv, origin = best
        found.append(replace(match, encoded_after=encoded_after))
        begin = max(match.begin, placements[-1].end if placements else 0)
        # The prompt's last token is always computed, for its logits.
        end = min(match.end, len(ids) - 1)
        if end <= begin:  # covered already, but a part of it is in the prompt
            if match.is_part:
                chunks.append((match.chunk.text_digest, begin))
            continue
        offset = begin - match.first
        start = encoder.start(encoded_after)
        # Then some of its document stood before it.
        is_settled = start is not None and kv.start > start
        kv = kv.slice(offset, offset + end - begin)
        is_in_place = encodings.is_in_place(encoded_after, match)
        is_exact = offset == 0 and kv.start == begin and is_in_place
        source = None if encoded_after == HARVESTED else (encoded_after, match.chunk.token_ids)
        placements.append(
            Placement(begin, kv, is_exact, source=source, origin=origin, is_settled=is_settled)
        )
        chunks.append((match.chunk.text_digest, end))
    if placements and _saves_nothing(*placements[:2]):
        del placements[0]
    return Plan(tuple(placements), tuple(found), len(ids), tuple(chunks))


def _saves_nothing(first: Placement, *second: Placement) -> bool:
    is_short = not first.is_chunk and first.end < _SHORTEST_HEAD
    return is_short and not any(one.is_exact for one in second)


def _harvested(
    kept: Sequences, namespace: str, ids: tuple[int, ...], match: Match
) -> tuple[Match, tuple[EncodedAfter, ModuleKV, Origin]] | None:
    """A chunk as far as the middle of a kept prompt has KV of its tokens, with this KV.

    A few of its tokens at each end may be others there, where they merged with other neighbours.
    """
    wanted = np.asarray(ids[match.begin : match.end], dtype=np.int64)
    # What is left has to be most of the text, or else a phrase of any prompt would be taken for it.
    trim = MAX_TRIM if len(wanted) > 8 * MAX_TRIM else 0
    inner = wanted[trim : len(wanted) - trim]
    found = kept.containing(namespace, inner)
    if found is None:
        return None
    sequence, slot = found
    exact = sequence.ids[: sequence.exact_length]
    end = slot + len(inner)
    first = trim - common(wanted[:trim][::-1], exact[:slot][::-1])
    more = common(wanted[len(wanted) - trim :], exact[end:])
    kv = sequence.piece(slot - trim + first, end + more)
    if kv is None:
        return None
    begin = match.begin + first
    whole = replace(match, begin=begin, end=begin + kv.seq_len, offset=0)
    return whole, (HARVESTED, kv, HARVEST)


def _head(
    library: Library, prefixes: Sequence[tuple[int, ...]], ids: tuple[int, ...]
) -> list[Placement]:
    """A placement of the longest known prefix's own KV, as far as the prompt begins with it.

    It is exact also if the prompt has only a part of the prefix.
    """
    for prefix_ids in prefixes:
        length = min(shared(prefix_ids, ids), len(ids) - 1)
        if not length:  # nothing stands before lone chunks, where there is no BOS token
            continue
        if found := library.shelf.best_encoding([EncodedAfter(())], prefix_ids, lazy=False):
            _, kv, origin = found
            part = kv.slice(0, length)
            return [Placement(0, part, is_exact=True, is_chunk=False, origin=origin)]
    return []
