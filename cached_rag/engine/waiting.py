"""The queue of waiting requests: tenants take turns, each tenant's requests keep their order."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from cached_rag.engine.request import Request
from cached_rag.errors import BusyError

# The last admissions count, and with fewer than so many nothing is foretold.
_KEPT, _LEAST = 16, 4


class Waiting:
    """The queue: one request of each tenant after the other, in turns.

    A request whose prompt is not read yet lets others go first. Safe for several threads.
    """

    def __init__(self, bound: int | None, max_seconds: float | None = None) -> None:
        """An empty queue.

        Args:
            bound, max_seconds: `BatchConfig.max_waiting` and `max_wait_seconds`.
        """
        self._bound, self._max_seconds = bound, max_seconds
        self._pace = Pace()
        self._queue: list[Request] = []  # those of a turn as they came
        self._turn = 0  # in which requests are admitted now
        # Reentrant: the garbage collector may drop a stream, and so come back, at any point.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._queue))

    def add(self, request: Request, free: int = 0) -> None:
        """Queue a request for its tenant's next turn.

        Args:
            free: number of requests that can be admitted at once, so they do not count as waiting.

        Raises:
            BusyError: too many requests wait already, or too long.
        """
        with self._lock:
            own = [one.turn + 1 for one in self._queue if one.tenant == request.tenant]
            request.turn = max([self._turn, *own])
            self._check(request, len(own), len(self) - free)
            self._put(len(self), request)

    def _put(self, place: int, request: Request) -> None:
        if not self._queue:
            self._pace.start()
        self._queue.insert(place, request)

    def _check(self, request: Request, own: int, count: int) -> None:
        """Raise if a request may not wait, besides so many others, and so many of its tenant."""
        if count <= 0:
            return
        ahead = sum(one.turn <= request.turn for one in self._queue)
        seconds = self._pace.seconds(min(count, ahead))
        if self._bound is not None and self._is_full(self._bound, count, own, request.tenant):
            raise BusyError(
                f"{count} requests wait already, and no more may; {_again(seconds)} max_waiting "
                "(BatchConfig; of a server, --max-waiting)",
                seconds,
            )
        if self._max_seconds is not None and seconds > self._max_seconds:
            later = seconds - self._max_seconds
            raise BusyError(
                f"the answer would not be begun for {seconds:.0f} seconds, and requests may wait "
                f"for {self._max_seconds:g}; {_again(later)} max_wait_seconds (BatchConfig; of a "
                "server, --max-wait-seconds)",
                later,
            )

    def _is_full(self, bound: int, count: int, own: int, tenant: str) -> bool:
        """Whether no more may wait, or not of this tenant.

        Whoever fills the queue leaves the others their share of it. These are let in beyond the
        bound, which bounds what each of them has, and twice of which bounds all of them.
        """
        share = bound // len({tenant, *(one.tenant for one in self._queue)})
        return count >= 2 * bound or (count >= bound and own >= share)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted again, before all others."""
        with self._lock:
            request.turn = -1
            self._put(0, request)

    def first(self) -> Request | None:
        """The request that is to be admitted next, or dropped if nobody wants it; None if none."""
        ready = (one for one in self if one.prompt.reading or not one.is_wanted)
        return min(ready, key=lambda one: one.turn, default=None)

    def admit(self, request: Request) -> None:
        """Take out a request whose answer is begun."""
        with self._lock:
            self._turn = max(self._turn, request.turn)
            self.remove(request)
            self._pace.note()

    def remove(self, request: Request) -> None:
        """Take a request out, if it is here."""
        with self._lock, suppress(ValueError):
            self._queue.remove(request)


def _again(seconds: float) -> str:
    """What whoever was refused can do; up to the setting that is to be raised."""
    return f"ask again in {max(1, math.ceil(seconds))} s, or have whoever runs this raise"


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
