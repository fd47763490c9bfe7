"""Blobs in an object store (S3 and what speaks like it, Google's, Azure's) or a mounted folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Thread
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from cached_rag.errors import ConfigError
from cached_rag.kv.transport import SENDING_S, label_of, why_unusable

# Requests at the same time; an object store answers each in some tens of milliseconds.
_THREADS = 16


class ObjectBlobs:
    """A `Transport`: one object a blob, several requests at the same time.

    Credentials and the endpoint come from where the store's own tools take them, as
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
    """

    batch = 64

    def __init__(self, url: str, timeout_s: float) -> None:
        self.label = label_of(url)
        self._threads = ThreadPoolExecutor(_THREADS, "objects")
        self._closed = Future[None]()
        try:
            self._store: Any = from_url(url, **_options(url, timeout_s, 1))
            self._sender: Any = from_url(url, **_options(url, max(timeout_s, SENDING_S), 0))
        except (BaseError, ValueError) as error:
            reason = why_unusable(url, error)
            raise ConfigError(f"{self.label} cannot be used as an object store: {reason}") from None

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """See `Transport`."""
        return list(self._threads.map(self._get, names, most_bytes))

    def has(self, names: Sequence[str]) -> list[bool]:
        """See `Transport`."""
        return list(self._threads.map(self._has, names))

    def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        sent = Future[None]()
        args = (sent, lambda: obstore.put(self._sender, name, data))
        try:  # the interpreter's end waits for threads of a pool, also when this was closed
            Thread(target=_settle, args=args, name="sending", daemon=True).start()
        except RuntimeError:  # it has come to its end, and starts no thread any more
            _settle(*args)
        wait((sent, self._closed), return_when=FIRST_COMPLETED)
        if not sent.done():
            raise OSError("it was closed in this process while it was sent to")
        sent.result()

    def delete(self, names: Sequence[str]) -> None:
        """See `Transport`."""
        try:
            obstore.delete(self._store, list(names))  # in one request, where the store can
        except FileNotFoundError:
            list(self._threads.map(self._delete, names))  # waits for all

    def close(self) -> None:
        """See `Transport`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._closed.done():
            self._closed.set_result(None)

    def _get(self, name: str, most_bytes: int) -> bytes | None:
        try:
            found = obstore.get(self._store, name, options={"range": (0, most_bytes)})
        except FileNotFoundError:  # obstore's NotFoundError is one
            return None
        data = bytearray()
        for part in found.stream():
            data += part
            if len(data) > most_bytes:
                raise OSError(f"it sends more than the {most_bytes} bytes that it was asked for")
        return bytes(data)

    def _has(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, name)


def _settle(done: Future[None], work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _options(url: str, timeout_s: float, retries: int) -> dict[str, Any]:
    if url.startswith("file:"):
        return {"mkdir": True}
    wait = f"{timeout_s:g}s"
    return {
        "client_options": {"timeout": wait, "connect_timeout": wait, "allow_http": True},
        "retry_config": {"max_retries": retries},
    }
