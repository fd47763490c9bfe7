"""The queue of waiting requests: tenants take turns, each tenant's requests keep their order."""

import math
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from cached_rag.engine.request import Request
from cached_rag.errors import BusyError

# The last admissions count, and with fewer than so many nothing is foretold.
_KEPT, _LEAST = 16, 4


class Waiting:
    """The queue: one request of each tenant after the other, in a circle.

    A request whose prompt is not read yet lets others go first. Safe for several threads.
    """

    def __init__(self, bound: int | None, max_seconds: float | None = None) -> None:
        """An empty queue.

        Args:
            bound, max_seconds: `BatchConfig.max_waiting` and `max_wait_seconds`.
        """
        self._bound, self._max_seconds = bound, max_seconds
        self._pace = Pace()
        self._tenants: OrderedDict[str, deque[Request]] = OrderedDict()
        # Reentrant: the garbage collector may drop a stream, and so come back, at any point.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, list(self._tenants.values())))

    def __iter__(self) -> Iterator[Request]:
        with self._lock:
            return iter(
                [request for line in list(self._tenants.values()) for request in list(line)]
            )

    def add(self, request: Request, free: int = 0) -> None:
        """Put a request at the end of its tenant's line.

        Args:
            free: number of requests that can be admitted at once, so they do not count as waiting.

        Raises:
            BusyError: too many requests wait already, or too long.
        """
        with self._lock:
            self._check(request.tenant, len(self) - free)
            self._line(request.tenant).append(request)

    def _line(self, tenant: str) -> deque[Request]:
        """A tenant's line, to which a request is added now."""
        if not self._tenants:
            self._pace.start()
        return self._tenants.setdefault(tenant, deque())

    def _check(self, tenant: str, count: int) -> None:
        """Raise if a tenant's next request may not wait, besides so many others."""
        if count <= 0:
            return
        # The tenants take turns, so of the others' lines only so much goes before it.
        own = len(self._tenants.get(tenant, ()))
        ahead = sum(min(len(line), own + 1) for line in self._tenants.values())
        seconds = self._pace.seconds(min(count, ahead))
        if self._bound is not None and self._is_full(self._bound, count, own, tenant):
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
        share = bound // len(self._tenants.keys() | {tenant})
        return count >= 2 * bound or (count >= bound and own >= share)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted again, before all others."""
        with self._lock:
            self._line(request.tenant).appendleft(request)
            self._tenants.move_to_end(request.tenant, last=False)

    def first(self) -> Request | None:
        """The request that is to be admitted next, or dropped if nobody wants it; None if none."""
        with self._lock:
            return next((one for one in self if one.prompt.reading or not one.is_wanted), None)

    def admit(self, request: Request) -> None:
        """Take out a request whose answer is begun."""
        with self._lock:
            self.remove(request)
            self._pace.note()

    def remove(self, request: Request) -> None:
        """Take a request out, if it is here. If it was the first, its tenant goes to the end."""
        with self._lock:
            line = self._tenants.get(request.tenant)
            if line is None or request not in line:
                return
            is_first = self.first() is request
            line.remove(request)
            if not line:
                self._tenants.pop(request.tenant, None)
            elif is_first:
                self._tenants.move_to_end(request.tenant)


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
