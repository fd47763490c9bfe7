"""A prompt as text, and as tokens with their places in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A prompt as text.

    Attributes:
        text: with the chat template applied.
        literal: character spans in which control tokens are read as text.
        is_chat: the chat template has written all special tokens, so tokenising adds none.
    """

    text: str
    literal: tuple[Span, ...] = ()
    is_chat: bool = False

    def until(self, end: int) -> Rendered:
        """The prompt's first `end` characters."""
        literal = tuple((start, min(stop, end)) for start, stop in self.literal if start < end)
        return Rendered(self.text[:end], literal, self.is_chat)


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes:
        ids: token ids.
        starts, ends: character offsets of each token; equal for tokens without text.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, other: Tokens, at: int) -> None:
        """Add the tokens of a text that begins at character `at`."""
        self.ids.extend(other.ids)
        self.starts.extend(at + offset for offset in other.starts)
        self.ends.extend(at + offset for offset in other.ends)


class Spans:
    """Character spans, merged where they overlap, for quick look-up."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(spans):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def touch(self, begin: int, end: int) -> bool:
        """Whether a span overlaps the characters from `begin` to `end` (exclusive)."""
        last = bisect_left(self._begins, end) - 1
        return last >= 0 and begin < self._ends[last]
