"""Brings modules into memory before they are asked for. Knows keys; is told how to fetch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_THREADS = 2


class Prefetcher:
    """Fetches modules on threads of its own. `wait` waits for one module, never for others."""

    def __init__(self) -> None:
        self._coming: dict[str, Future[object]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def start(self, key: str, fetch: Callable[[], object]) -> None:
        """Begin to fetch a module, unless that has begun already. `fetch` must not raise."""
        with self._lock:
            if key in self._coming:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "prefetch")
            future = self._coming[key] = self._threads.submit(fetch)
        future.add_done_callback(lambda _: self._coming.pop(key, None))

    def wait(self, key: str) -> None:
        """Return when a module has been fetched; at once if nobody fetches it."""
        future = self._coming.get(key)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Finish the fetches that have begun, and drop the others."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
