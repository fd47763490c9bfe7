"""The queue of waiting requests: tenants take turns, each tenant's requests keep their order."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator

from cached_rag.engine.request import Request
from cached_rag.errors import BusyError


class Waiting:
    """The queue: one request of each tenant after the other, in a circle.

    A request whose prompt is not read yet lets others go first. Safe for several threads.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
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
            BusyError: too many requests wait already.
        """
        with self._lock:
            count = len(self) - free
            if self._bound is not None and count >= self._bound:
                raise BusyError(
                    f"{count} requests wait already, and no more may; ask again later, or raise "
                    "BatchConfig.max_waiting"
                )
            self._tenants.setdefault(request.tenant, deque()).append(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted again, before all others."""
        with self._lock:
            self._tenants.setdefault(request.tenant, deque()).appendleft(request)
            self._tenants.move_to_end(request.tenant, last=False)

    def first(self) -> Request | None:
        """The request that is to be admitted next, or dropped if nobody wants it; None if none."""
        with self._lock:
            return next((one for one in self if one.reading or not one.is_wanted), None)

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
