"""What the chunks of a prompt may have been encoded behind, best first. Knows tokens, no KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.library.matching import EncodedAfter, Match
from cached_rag.library.shelf import Wanted

# The last tokens of a known prefix may differ in a prompt, where they merged with what follows.
_HEAD_SLACK = 4
# How many encodings behind other heads are tried for a chunk: each try is a look-up in the store,
# and a client may make any number of heads known.
_MOST_OTHERS = 4


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
    def of(
        cls, ids: tuple[int, ...], known: Sequence[EncodedAfter], sink_ids: tuple[int, ...]
    ) -> Encodings:
        """Those of a prompt.

        Args:
            known: all that chunks were encoded behind, as `Library.encoded_after` has it.
            sink_ids: the tokens before chunks that were encoded without a prefix.
        """
        heads = [one for one in known if is_before(one.prefix_ids, ids)]
        usable = tuple(_ranked(known, heads, sink_ids))
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
        heads: those of `known` that the prompt begins with.
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


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
