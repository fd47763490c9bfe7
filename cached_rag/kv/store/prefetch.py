"""Brings modules into memory before they are asked for. Knows names; is told how to fetch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

_THREADS = 2


class Prefetcher:
    """Fetches modules on threads of its own. `wait` waits for some modules, never for others."""

    def __init__(self) -> None:
        self._coming: dict[str, Future[object]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def start(self, names: Sequence[str], fetch: Callable[[], object]) -> None:
        """Begin to fetch what goes by these names, unless all of that has begun already.

        Args:
            fetch: fetches all of it; must not raise.
        """
        with self._lock:
            new = [name for name in names if name not in self._coming]
            if not new:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "prefetch")
            future = self._threads.submit(fetch)
            self._coming |= dict.fromkeys(new, future)
        future.add_done_callback(lambda _: [self._coming.pop(name, None) for name in new])

    def wait(self, names: Iterable[str]) -> None:
        """Return when what goes by these names has been fetched; at once if nobody fetches it."""
        for future in filter(None, [self._coming.get(name) for name in names]):
            with suppress(CancelledError):  # by `close`
                future.result()

    def close(self) -> None:
        """Finish the fetches that have begun, and drop the others."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
