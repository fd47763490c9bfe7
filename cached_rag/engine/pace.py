"""How fast waiting requests are admitted, and so how long a new one would wait. Knows only time."""

from __future__ import annotations

import statistics
import time
from collections import deque

# The last admissions count, and with fewer than so many nothing is foretold.
_KEPT, _LEAST = 16, 4


class Pace:
    """The last admissions' intervals; time in which nobody waited counts for none of them."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=_KEPT)
        self._since = 0.0

    def start(self) -> None:
        """Somebody waits, and nobody did before."""
        self._since = time.monotonic()

    def note(self) -> None:
        """A request was admitted."""
        now = time.monotonic()
        self._intervals.append(now - self._since)
        self._since = now

    def seconds(self, count: int) -> float:
        """In how many seconds so many waiting requests would be admitted; 0 if that is unknown."""
        if len(self._intervals) < _LEAST:
            return 0.0
        mean = statistics.fmean(self._intervals)
        # An interval that lasts still: where nothing gets on, the last ones are no measure.
        return count * max(
            mean, statistics.fmean([*self._intervals, time.monotonic() - self._since])
        )
