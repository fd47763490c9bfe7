"""How fast the way to a remote store is, by what it took lately."""

from __future__ import annotations

import time

# The weight of the newest measurement, and how long measurements count.
_NEWEST = 0.3
_FRESH_S = 30.0


class Link:
    """Latency and bandwidth, as moving means.

    Attributes:
        latency_s: seconds of a round trip that carries nothing; None before the first one.
        tokens_per_s: how fast KV comes, in tokens; None before the first that came.
    """

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.tokens_per_s: float | None = None
        self._measured = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take over a measurement: a round trip that brought the KV of so many tokens."""
        self._measured = time.monotonic()
        if not tokens:
            self.latency_s = _mean(self.latency_s, seconds)
            return
        carrying = max(seconds - (self.latency_s or 0.0), seconds / 10)
        self.tokens_per_s = _mean(self.tokens_per_s, tokens / carrying)

    def load_s(self, tokens: int) -> float | None:
        """Seconds that a round trip with the KV of so many tokens will take.

        None if that is not known, or was measured so long ago that it should be tried again.
        """
        if self.tokens_per_s is None or time.monotonic() - self._measured > _FRESH_S:
            return None
        return (self.latency_s or 0.0) + tokens / self.tokens_per_s


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
