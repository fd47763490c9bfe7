"""What carries blobs to another machine and back, by name, and how it is asked.

It is asked within a time, and not while it failed lately. Knows no tensor.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from typing import Protocol, TypeVar

from cached_rag.errors import StoreError

# Seconds that sending a blob may take; nobody waits for it.
SENDING_S = 60.0
# The pauses after failures: the first, and the longest.
_FIRST_S, _LONGEST_S = 1.0, 30.0
# The weight of the newest measurement of a link, and how long measurements count.
_NEWEST, _FRESH_S = 0.3, 30.0
_THREADS = 4
_T = TypeVar("_T")
_SECRET = re.compile(r"(?<=://)\S*@|\?\S*")


class Transport(Protocol):
    """Blobs by name. Safe for several threads.

    Every method may raise any error, when the other side is away, slow, refuses, or replies what
    it was not asked for. No reply takes more memory than was expected.

    Attributes:
        label: the address without passwords, for messages.
        batch: how many names `has` and `delete` take at most.
    """

    label: str
    batch: int

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """The blobs of these names, None for each that is not there. All in one round trip.

        Args:
            most_bytes: as much is taken of each blob; of a longer one, its beginning.
        """
        ...

    def has(self, names: Sequence[str]) -> list[bool]:
        """Whether there are blobs of these names. All in one round trip."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep a blob, in place of any of the same name."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; names without one are ignored."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def label_of(url: str) -> str:
    """A URL without user, password and query, to be shown."""
    scheme, _, rest = url.partition("://")
    secret, _, place = rest.rpartition("@")
    if "?" in secret:  # a password has it, or a query has the "@": both may be secret
        place = "..."
    return f"{scheme}://{place.partition('?')[0]}"


def why_unusable(url: str, error: Exception) -> str:
    """Why a URL is no address, to be shown: an error's own words may have parts of a password."""
    if label_of(url) == url:
        return shown(error)
    return "check it, and percent-encode : / # ? @ where a user or a password has them"


def shown(error: Exception) -> str:
    """An error's first line, without users, passwords and queries of the URLs in it."""
    return _SECRET.sub("", str(error).partition("\n")[0])[:500]


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
