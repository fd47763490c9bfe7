"""What reaches a remote store, where blobs lie by name: Redis, an object store, a mounted folder.

And how it is called, so that one that fails is waited for seldom. Knows no tensor.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from cached_rag.errors import ConfigError, StoreError, needs_extra

_T = TypeVar("_T")
_REDIS = ("redis", "rediss", "unix")
_OBJECTS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")
# Seconds that sending a blob may take; nobody waits for it.
SENDING_S = 60.0
_SECRET = re.compile(r"(?<=://)\S*@|\?\S*")
# The pauses after failures: the first, and the longest. How many calls there are at a time.
_FIRST_S, _LONGEST_S = 1.0, 30.0
CALLS = 4
# Requests at the same time to an object store, which answers each in some tens of milliseconds.
_THREADS = 16
# Names in Redis begin with this, as others may use the same server.
_PREFIX = "cached-rag/"
_MOST_CONNECTIONS = 16
# Most bytes of a reply that has no blobs in it, and of what stands around each blob in others.
_SMALL, _AROUND = 1 << 20, 64
# How many bytes the reply to what this thread sends next may have.
_expected = threading.local()


class Transport(Protocol):
    """Blobs by name. Safe for several threads.

    Every method may raise any error, when the other side is away, slow, refuses, or replies what
    it was not asked for. No reply takes more memory than was expected.

    Attributes:
        label: the address without passwords, for messages.
        batch: how many names `begin` and `delete` take at most.
    """

    label: str
    batch: int

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """The blobs of these names, None for each that is not there. All in one round trip.

        Args:
            most_bytes: as much is taken of each blob; of a longer one, its beginning.
        """

    def begin(self, names: Sequence[str], size: int) -> list[bytes | None]:
        """As `get`, but only the first bytes of each blob."""

    def put(self, name: str, data: bytes) -> None:
        """Keep a blob, in place of any of the same name."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; names without one are ignored."""

    def close(self) -> None:
        """Release connections."""


def open_transport(url: str, timeout_s: float) -> Transport:
    """What reaches a URL. Connects when it is first used.

    Args:
        url: redis://, rediss:// or unix:// for Redis and what speaks like it; s3://, gs://, az://,
            http(s):// or file:// for an object store.
        timeout_s: how long a single step on the network may take.

    Raises:
        ConfigError: no such kind of URL.
        MissingPackageError: the extra that it needs is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme in _REDIS:
        return RedisBlobs(url, timeout_s)
    if scheme in _OBJECTS:
        return ObjectBlobs(url, timeout_s)
    known = ", ".join(f"{name}://" for name in (*_REDIS, *_OBJECTS))
    raise ConfigError(f"{label_of(url)!r} is no address of a remote store; known are {known}")


def label_of(url: str) -> str:
    """A URL without user, password and query, to be shown; of what is none, its first word."""
    scheme, there, rest = url.partition("://")
    if not there:
        return re.split(r"\W", url)[0]
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


class Calls:
    """One way of using a transport: its failures stop only calls of the same object.

    After a failure nobody asks for a second, or as long as the failure took; then one asks, and if
    that fails, too, the pause doubles, up to half a minute.
    """

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """Ask nothing yet.

        Args:
            timeout_s: the longest wait of `ask`, and what counts as an answer in time.
        """
        self.timeout_s = timeout_s
        self._transport = transport
        # When somebody may ask again, how long the last pause was, and when the last call failed.
        self._until = self._pause = 0.0
        self._failed_at = float("-inf")
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(CALLS)
        self._closed: Future[Any] = Future()

    @property
    def pause_s(self) -> float:
        """Seconds until it may be asked again; 0 for now."""
        return max(0.0, self._until - time.monotonic())

    def ask(self, work: Callable[[], _T]) -> _T:
        """Do something with the transport, and wait for `timeout_s` at most.

        Raises:
            StoreError: it did not answer in time, refused, lately did one of these, or is closed.
        """
        return self._answer(work, self.timeout_s)

    def do(self, work: Callable[[], _T]) -> _T:
        """As `ask`, but only the transport's own bounds, or `close`, end it."""
        return self._answer(work, None)

    def rest(self, seconds: float) -> bool:
        """Wait; says whether this was closed meanwhile."""
        wait((self._closed,), seconds)
        return self._closed.done()

    def close(self) -> None:
        """Ask no more. What is being asked is left to end by itself."""
        with suppress(InvalidStateError):
            self._closed.set_result(None)

    def _answer(self, work: Callable[[], _T], patience_s: float | None) -> _T:
        self._check()
        began, answer = time.monotonic(), Future[_T]()
        args = answer, work
        try:  # the interpreter's end waits for threads of a pool, also when that was shut down
            threading.Thread(target=self._settle, args=args, name="remote", daemon=True).start()
        except RuntimeError:  # it has come to its end, and starts no thread any more
            self._settle(*args)
        wait((answer, self._closed), patience_s, FIRST_COMPLETED)
        if answer.done():
            try:
                return answer.result()
            finally:  # an error knows this frame: else each would hold the other, and what was sent
                del answer, args
        answer.cancel()  # if it has not begun
        if self._closed.done():
            raise self._was_closed()
        self._failed(began)
        raise self._failure(f"it did not answer within {patience_s:g} s")

    def _settle(self, answer: Future[_T], work: Callable[[], _T]) -> None:
        with self._turns:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(self._done(work))
            except BaseException as error:
                answer.set_exception(error)
                del answer  # as in `_answer`

    def _check(self) -> None:
        if self._closed.done():
            raise self._was_closed()
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                raise self._failure("it failed lately")
            # After a pause one may ask; others, when that one is late.
            self._until = now + min(self._pause, _FIRST_S)

    def _done(self, work: Callable[[], _T]) -> _T:
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:  # whatever a reply makes of who reads it
            self._failed(began)
            raise self._failure(shown(error)) from None  # its cause would show a password
        if time.monotonic() - began < self.timeout_s:  # later is as bad as never
            with self._lock:
                self._until = self._pause = 0.0
        return result

    def _failed(self, began: float) -> None:
        """Note a failure of what began then; if one is known since then, this is the same one."""
        with self._lock:
            if began >= self._failed_at:
                self._failed_at = time.monotonic()
                took = self._failed_at - began
                self._pause = min(_LONGEST_S, max(_FIRST_S, 2 * self._pause, took))
                self._until = self._failed_at + self._pause

    def _was_closed(self) -> StoreError:
        return StoreError(f"the remote store {self._transport.label} was closed in this process")

    def _failure(self, reason: str) -> StoreError:
        return StoreError(
            f"the remote store {self._transport.label} cannot be used now: {reason}. It is asked "
            f"again in {self.pause_s:.0f} s; until then its KV is computed"
        )


class ObjectBlobs:
    """A `Transport`: one object a blob, several requests at the same time.

    Credentials and the endpoint come from where the store's own tools take them, as
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
    """

    batch = 64

    def __init__(self, url: str, timeout_s: float) -> None:
        with needs_extra("s3", "a remote store of objects"):
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        self.label = label_of(url)
        self._threads = ThreadPoolExecutor(_THREADS, "objects")
        try:
            self._store: Any = from_url(url, **_options(url, timeout_s, 1))
            self._sender: Any = from_url(url, **_options(url, max(timeout_s, SENDING_S), 0))
        except (BaseError, ValueError) as error:
            reason = why_unusable(url, error)
            raise ConfigError(f"{self.label} cannot be used as an object store: {reason}") from None

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """See `Transport`."""
        return list(self._threads.map(self._get, names, most_bytes))

    def begin(self, names: Sequence[str], size: int) -> list[bytes | None]:
        """See `Transport`."""
        return list(self._threads.map(partial(self._begin, size), names))

    def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        self._sender.put(name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See `Transport`."""
        try:
            self._store.delete(list(names))  # in one request, where the store can
        except FileNotFoundError:
            list(self._threads.map(self._delete, names))  # waits for all

    def close(self) -> None:
        """See `Transport`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, name: str, most_bytes: int, options: Any = None) -> bytes | None:
        try:
            found = self._store.get(name, options=options)
        except FileNotFoundError:  # obstore's NotFoundError is one
            return None
        data = bytearray()
        for part in found.stream():
            data += part
            if len(data) >= most_bytes:
                break
        return bytes(data[:most_bytes])

    def _begin(self, size: int, name: str) -> bytes | None:
        try:
            return self._get(name, size, {"range": (0, size)})
        except Exception:  # of an empty object a range is an error, as it is to plain servers
            return self._get(name, size)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._store.delete(name)


def _options(url: str, timeout_s: float, retries: int) -> dict[str, Any]:
    if url.startswith("file:"):
        return {"mkdir": True}
    wait = f"{timeout_s:g}s"
    return {
        "client_options": {"timeout": wait, "connect_timeout": wait, "allow_http": True},
        "retry_config": {"max_retries": retries},
    }


class _Bounded:
    """A socket that gives up on a reply with more bytes than expected, or one without an end."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._left, self._until = socket, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: Any) -> None:
        self._left = getattr(_expected, "nbytes", _SMALL)
        self._until = time.monotonic() + SENDING_S
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        data: bytes = self._socket.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        count: int = self._socket.recv_into(*args)
        self._count(count)
        return count

    def _count(self, received: int) -> None:
        self._left -= received
        if self._left < 0 or time.monotonic() > self._until:
            raise OSError("its reply has more bytes than were asked for, or does not end")


class _BoundedConnection:
    """Put before a class of redis-py's connections."""

    def _connect(self) -> Any:
        return _Bounded(super()._connect())  # type: ignore[misc]


class RedisBlobs:
    """A `Transport`. What the server evicts is a miss: bounds are set there (maxmemory)."""

    batch = 1000

    def __init__(self, url: str, timeout_s: float) -> None:
        self.label = label_of(url)
        self._client = _client(url, timeout_s)
        self._sender = _client(url, max(timeout_s, SENDING_S))

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """See `Transport`."""
        _expected.nbytes = sum(most_bytes) + _AROUND * len(names) + _SMALL
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for name, most in zip(_prefixed(names), most_bytes, strict=True):
                    pipe.getrange(name, 0, most - 1)
                found = _replies(pipe, len(names))
        finally:
            del _expected.nbytes
        return [data or None for data in found]  # it says nothing of what it does not have

    def begin(self, names: Sequence[str], size: int) -> list[bytes | None]:
        """See `Transport`."""
        return self.get(names, [size] * len(names))

    def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        self._sender.set(_PREFIX + name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See `Transport`."""
        self._client.unlink(*_prefixed(names))

    def close(self) -> None:
        """See `Transport`."""
        self._client.close()
        self._sender.close()


def _replies(pipe: Any, count: int) -> list[bytes]:
    """What a pipeline comes to; empty for what is no value of this library.

    Raises:
        OSError: it is not so many replies of this kind.
    """
    import redis

    found = pipe.execute(raise_on_error=False)
    if isinstance(found, list):  # a key of another type is one error, and takes no other with it
        found = [b"" if isinstance(one, redis.ResponseError) else one for one in found]
    if not (isinstance(found, list) and [type(one) for one in found] == [bytes] * count):
        raise OSError("its reply is none to what it was asked")
    return found


def _client(url: str, timeout_s: float) -> Any:
    with needs_extra("redis", "a remote store in Redis"):
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    # A connection that the server closed meanwhile is opened again, once.
    again = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=again,
            max_connections=_MOST_CONNECTIONS,
        )
    except ValueError as error:
        reason = why_unusable(url, error)
        raise ConfigError(f"{label_of(url)} is no address of a Redis server: {reason}") from None
    pool = client.connection_pool
    pool.connection_class = type("Bounded", (_BoundedConnection, pool.connection_class), {})
    return client


def _prefixed(names: Sequence[str]) -> list[str]:
    return [_PREFIX + name for name in names]
