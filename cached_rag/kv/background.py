"""Does things with modules in the background: what waits is bounded, or is waited for by name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.tiers import IsWanted

_log = logging.getLogger(__name__)
_THREADS = 2
# How long `drop` waits for what is under way already.
_UNDER_WAY_S = 60.0
Work = Callable[[str, ModuleKV, IsWanted], bool]


@dataclass(frozen=True)
class _Item:
    future: Future[None]
    nbytes: int


class Outbox:
    """Modules that wait for something to be done with them. Safe for several threads."""

    def __init__(self, work: Work, max_bytes: int, patience_s: float = 0.0) -> None:
        """Start with nothing.

        Args:
            work: does it for a key and its module, unless that is not wanted any more, and says
                whether that worked.
            max_bytes: most bytes of KV that wait.
            patience_s: how long `add` waits for room, all of its calls between two of `drain`
                together.
        """
        self._do, self._max_bytes = work, max_bytes
        self._patience_s = self._patience_left = patience_s
        self._items: dict[str, _Item] = {}
        self._failed = 0
        self._is_closed = False
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def add(self, name: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Do it for a module when its turn comes. If there is no room, it counts as failed.

        Args:
            name: the same name is not added twice.
            wanted: says whether it still is to be done; it may have to wait long.
        """
        with self._changed:
            self._wait_for_room(kv.nbytes)
            if name in self._items:
                return
            if self._is_closed or not self._has_room(kv.nbytes):
                self._failed += 1
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "outbox")
            future = self._threads.submit(self._work, name, kv, wanted)
            self._items[name] = _Item(future, kv.nbytes)

    def _wait_for_room(self, nbytes: int) -> None:
        began = time.monotonic()
        self._changed.wait_for(lambda: self._has_room(nbytes), self._patience_left)
        self._patience_left = max(0.0, self._patience_left - (time.monotonic() - began))

    def _has_room(self, nbytes: int) -> bool:
        waiting = sum(item.nbytes for item in self._items.values())
        return not waiting or waiting + nbytes <= self._max_bytes

    def _work(self, name: str, kv: ModuleKV, wanted: IsWanted) -> None:
        is_done = False
        try:
            is_done = self._do(name, kv, wanted)
        except Exception as error:  # such as no memory; the others still have their turn
            _log.warning("KV %s stays where it is: %s", name, error)
        finally:
            with self._changed:
                self._items.pop(name, None)
                self._failed += not is_done
                self._changed.notify_all()

    def settle(self, name: str) -> None:
        """Return when a module's turn is over; at once if it has none. Waits for no other."""
        if (item := self._items.get(name)) is not None:
            wait([item.future], _UNDER_WAY_S)

    def settle_all(self, begin: str, patience_s: float) -> None:
        """Return when nothing waits whose name begins so, or after so many seconds."""

        def is_over() -> bool:
            return self._is_closed or not any(name.startswith(begin) for name in self._items)

        with self._changed:
            self._changed.wait_for(is_over, patience_s)

    def drop(self, names: Iterable[str]) -> None:
        """Do it for none of these; returns when it is done for those whose turn it was."""
        with self._changed:
            found = [(name, self._items[name]) for name in names if name in self._items]
            cancelled = {name for name, item in found if item.future.cancel()}
            for name in cancelled:
                del self._items[name]
            self._changed.notify_all()
        wait([item.future for name, item in found if name not in cancelled], _UNDER_WAY_S)

    def drain(self, patience_s: float | None = None) -> int:
        """Wait until nothing waits.

        Args:
            patience_s: after so many seconds, what still waits counts as failed.

        Returns:
            How many modules failed since the last call.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._items, patience_s)
            failed, self._failed = self._failed + len(self._items), 0
            self._patience_left = self._patience_s
        return failed

    def close(self, patience_s: float) -> int:
        """As `drain`, then take no more and drop what still waits."""
        failed = self.drain(patience_s)
        self._is_closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        return failed


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
