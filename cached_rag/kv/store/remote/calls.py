"""Asks a transport, within a time, and not while it failed lately. Knows no blob."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from typing import TypeVar

from cached_rag.errors import StoreError
from cached_rag.kv.store.remote.breaker import Breaker
from cached_rag.kv.store.remote.transport import Transport, shown

_T = TypeVar("_T")
_THREADS = 4


class Calls:
    """One way of using a transport: its failures stop only calls of the same object."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """Ask nothing yet.

        Args:
            timeout_s: the longest wait of `ask`, and what counts as an answer in time.
        """
        self.timeout_s = timeout_s
        self._transport = transport
        self._breaker = Breaker()
        self._threads = ThreadPoolExecutor(_THREADS, "remote")
        self._closed = threading.Event()

    @property
    def pause_s(self) -> float:
        """Seconds until it may be asked again; 0 for now."""
        return self._breaker.left_s

    def ask(self, work: Callable[[], _T]) -> _T:
        """Do something with the transport, on another thread, and wait for `timeout_s` at most.

        Raises:
            StoreError: it did not answer in time, refused, lately did one of these, or is closed.
        """
        self._check()
        began = time.monotonic()
        future = self._threads.submit(self._done, work)
        try:
            return future.result(self.timeout_s)
        except LateError:
            future.cancel()
            self._breaker.failed(began)
            raise self._failure(f"it did not answer within {self.timeout_s:g} s") from None

    def do(self, work: Callable[[], _T]) -> _T:
        """As `ask`, on this thread; only the transport's own bounds end it."""
        self._check()
        return self._done(work)

    def rest(self, seconds: float) -> bool:
        """Wait; says whether this was closed meanwhile."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """Ask no more. What is being asked is left to end by itself."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self) -> None:
        if self._closed.is_set():
            raise StoreError(f"the remote store {self._transport.label} was closed in this process")
        if not self._breaker.allows():
            raise self._failure("it failed lately")

    def _done(self, work: Callable[[], _T]) -> _T:
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:  # whatever a reply makes of who reads it
            self._breaker.failed(began)
            raise self._failure(shown(error)) from None  # its cause would show a password
        if time.monotonic() - began < self.timeout_s:  # later is as bad as never
            self._breaker.succeeded()
        return result

    def _failure(self, reason: str) -> StoreError:
        return StoreError(
            f"the remote store {self._transport.label} cannot be used now: {reason}. It is asked "
            f"again in {self.pause_s:.0f} s; until then its KV is computed"
        )
