"""Keeps from asking again and again what does not answer (a circuit breaker)."""

from __future__ import annotations

import threading
import time

_FIRST_S, _LONGEST_S = 1.0, 30.0


class Breaker:
    """Says whether the other side may be asked. Safe for several threads.

    After a failure nobody asks for a second; then one asks, and if that fails, too, the pause
    doubles, up to half a minute.
    """

    def __init__(self) -> None:
        self._until = self._pause = 0.0
        self._failed_at = float("-inf")
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether to ask now. After a pause it says so to one; to others when that one is late."""
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                return False
            self._until = now + min(self._pause, _FIRST_S)
            return True

    @property
    def left_s(self) -> float:
        """Seconds until somebody may ask."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, began: float) -> None:
        """Note that the other side did not answer.

        Args:
            began: when it was asked, by `time.monotonic`. If another failure is known since then,
                this is the same one.
        """
        with self._lock:
            if began >= self._failed_at:
                self._failed_at = time.monotonic()
                self._pause = min(_LONGEST_S, max(_FIRST_S, 2 * self._pause))
                self._until = self._failed_at + self._pause

    def succeeded(self) -> None:
        """Note that it did."""
        with self._lock:
            self._until = self._pause = 0.0
