"""Work begun before its result is asked for. Knows keys; what to do it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_THREADS = 2


class Prefetcher:
    """Fetches on threads of its own. Who needs what is on its way waits for that alone; fetches of
    different modules never wait for each other.
    """

    def __init__(self) -> None:
        self._coming: dict[str, Future[object]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def start(self, key: str, fetch: Callable[[], object]) -> None:
        """Begin to fetch a module, unless it is on its way already. `fetch` must not raise."""
        with self._lock:
            if key in self._coming:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "prefetch")
            future = self._coming[key] = self._threads.submit(fetch)
        future.add_done_callback(lambda _: self._coming.pop(key, None))

    def wait(self, key: str) -> None:
        """Return once a module that is on its way has come."""
        future = self._coming.get(key)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Drop what has not begun, finish what has."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
