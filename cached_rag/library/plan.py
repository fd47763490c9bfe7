"""Decides, for one tokenised prompt, which tokens come from which cached module.

Knows tokens and the library; computes nothing. Exact reuse first: the longest known prefix of the
prompt, and the module right behind it if it was encoded behind just that. Then approximate reuse
of the other modules. What is left is computed, and so is always the text after the last module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cached_rag.backends.tokenizer import Tokens
from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter, Match, align
from cached_rag.methods import Layout, Takes

# A template head can share all but its last tokens with a prompt (they merged with what follows).
_HEAD_SLACK = 4


@dataclass(frozen=True)
class Placement:
    """Cached KV for prompt tokens from `begin` on.

    Attributes:
        is_exact: never recomputed: what full prefill would compute, or repaired before.
        is_module: else it is the prompt's prefix.
        source: what it was encoded behind, and its tokens, by which the library has it.
    """

    begin: int
    kv: LayerSource
    is_exact: bool
    is_module: bool = True
    source: tuple[EncodedAfter, tuple[int, ...]] | None = None

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.begin + self.kv.seq_len

    def after(self, slot: int) -> Placement:
        """What of it stands from a token on; there must be something."""
        if self.begin >= slot:
            return self
        return replace(self, begin=slot, kv=self.kv.slice(slot - self.begin, self.kv.seq_len))


@dataclass(frozen=True)
class Plan:
    """What to assemble, and what to compute.

    Attributes:
        placements: ascending, without overlaps.
        matches: the known chunks that the prompt contains.
        num_tokens: of the prompt.
        chunks: (digest, end) of the chunks whose KV is used, in order.
        positions: where the tokens stand; None if token i stands at i.
    """

    placements: tuple[Placement, ...]
    matches: tuple[Match, ...]
    num_tokens: int
    chunks: tuple[tuple[str, int], ...] = ()
    positions: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Positions up to the last token's, and one more."""
        return self.positions[-1] + 1 if self.positions else self.num_tokens

    def delta(self, place: Placement) -> int:
        """How far a placement's keys have to be moved."""
        at = place.begin if self.positions is None else self.positions[place.begin]
        return at - place.kv.start

    @property
    def missed(self) -> tuple[Match, ...]:
        """The chunks that have no KV."""
        return tuple(match for match in self.matches if match.encoded_after is None)

    def taking(self, what: Takes) -> Plan:
        """The plan with only so much of the cached KV."""
        if what is Takes.NOTHING:
            return Plan((), (), self.num_tokens)
        if what is Takes.ALL:
            return self
        exact = tuple(place for place in self.placements if place.is_exact)
        return replace(self, placements=exact)

    @property
    def num_modules(self) -> int:
        """Placements that are modules."""
        return sum(place.is_module for place in self.placements)

    def starting_from(self, pieces: Sequence[ModuleKV]) -> Plan:
        """The plan with its beginning replaced by KV that a prompt like this one left."""
        if not pieces:
            return self
        end = pieces[-1].start + pieces[-1].seq_len
        ahead = tuple(Placement(kv.start, kv, is_exact=True, is_module=False) for kv in pieces)
        later = (place.after(end) for place in self.placements if place.end > end)
        return replace(self, placements=(*ahead, *later))

    def layout(self, num_layers: int) -> Layout:
        """The plan as masks over tokens."""
        fresh = torch.ones(self.num_tokens, dtype=torch.bool)
        exact = torch.zeros(self.num_tokens, dtype=torch.bool)
        for place in self.placements:
            fresh[place.begin : place.end] = False
            if place.is_exact:
                exact[place.begin : place.end] = True
        spans = tuple((p.begin, p.end) for p in self.placements if not p.is_exact)
        return Layout(fresh, exact, spans, num_layers)


def make_plan(
    library: Library,
    tokens: Tokens,
    matches: Sequence[Match],
    sink_ids: tuple[int, ...],
    *,
    lazy: bool = False,
) -> Plan:
    """Choose the best KV for everything the prompt contains.

    Args:
        tokens: the prompt.
        matches: the chunks whose text was found in it.
        sink_ids: what chunks encoded alone stand behind.
        lazy: leave what is on disk unread.
    """
    ids = tuple(tokens.ids)
    known = library.encoded_after()
    ahead = [one for one in known if is_before(one.prefix_ids, ids)]
    placements = _head(library, [one.prefix_ids for one in ahead], ids)
    # What was encoded alone serves anywhere, also in prompts that do not begin with BOS.
    alone = [one for one in known if one.prefix_ids in (sink_ids, ())]
    alone += [EncodedAfter(sink_ids), EncodedAfter(())]
    ahead += [one for one in alone if one not in ahead]
    found, chunks = [], []
    for match in (aligned for one in matches if (aligned := align(one, tokens))):
        # Right behind its own prefix a chunk without context is exact, which beats all else.
        in_place = EncodedAfter(ids[: match.begin])
        first = [in_place] if in_place in ahead and not match.offset else []
        best = library.best_encoding([*first, *ahead], match.chunk.token_ids, lazy=lazy)
        if best is None:
            found.append(match)
            continue
        encoded_after, kv = best
        found.append(replace(match, encoded_after=encoded_after))
        begin = max(match.begin, placements[-1].end if placements else 0)
        # The last token's logits are wanted, so it is always computed.
        end = min(match.end, len(ids) - 1)
        if end <= begin:
            continue
        offset = begin - match.first
        kv = kv.slice(offset, offset + end - begin)
        is_exact = offset == 0 and kv.start == begin and encoded_after == in_place
        source = (encoded_after, match.chunk.token_ids)
        placements.append(Placement(begin, kv, is_exact, source=source))
        chunks.append((match.chunk.text_digest, end))
    return Plan(tuple(placements), tuple(found), len(ids), tuple(chunks))


def _head(
    library: Library, prefixes: Sequence[tuple[int, ...]], ids: tuple[int, ...]
) -> list[Placement]:
    """The longest known prefix's own KV: exact, also where only its beginning is shared."""
    for prefix_ids in prefixes:
        length = min(_shared(prefix_ids, ids), len(ids) - 1)
        kv = library.fetch(EncodedAfter(()), prefix_ids) if length else None
        if kv is not None:
            return [Placement(0, kv.slice(0, length), is_exact=True, is_module=False)]
    return []


def is_before(prefix_ids: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether a prompt begins with a prefix, but for tokens that merged with what follows."""
    return _shared(prefix_ids, ids) >= max(1, len(prefix_ids) - _HEAD_SLACK)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
