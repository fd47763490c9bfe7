"""What is left to compute of a prompt that is repaired, and where it may be cut.

A repair is cut into pieces that are computed between the tokens of running answers. A row sees no
later one, so pieces in the order of slots give what one pass gives. Only where a method moves a
chunk's other tokens as its computed ones are (drift), all of that chunk's rows are in one piece.
Knows slots; knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Pieces:
    """Rows of a prompt that are still to be computed.

    Attributes:
        slots: theirs, ascending.
        drifting: (begin, end) slots of the chunks that must not be cut, ascending.
    """

    slots: list[int]
    drifting: Sequence[tuple[int, int]] = ()

    @property
    def done(self) -> int | None:
        """How many of the prompt's tokens, from the first, are final; None for all."""
        if not self.slots:
            return None
        chunk = self._around(self.slots[0])
        return chunk[0] if chunk else self.slots[0]

    def count(self, most: int, *, at_least: bool = False) -> int:
        """How many rows the next piece has.

        Args:
            most: no more than that, as far as there is a place to cut; 0 if there is none.
            at_least: then up to the first place, instead of 0.
        """
        if most >= len(self.slots):
            return len(self.slots)
        chunk = self._around(self.slots[most])
        if chunk is None:
            return most
        before = bisect_left(self.slots, chunk[0])
        return before or (bisect_left(self.slots, chunk[1]) if at_least else 0)

    def _around(self, slot: int) -> tuple[int, int] | None:
        """The chunk that must not be cut and has a slot; None if there is none."""
        return next((chunk for chunk in self.drifting if chunk[0] <= slot < chunk[1]), None)
