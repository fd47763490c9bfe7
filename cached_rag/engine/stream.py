"""An answer for those who wait for it, piece by piece: in a thread, or in an event loop.

Knows the scheduler and its queue; knows no KV.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial

from cached_rag.backends import thread as model_thread
from cached_rag.engine.decoding import Generation
from cached_rag.engine.report import Report
from cached_rag.engine.request import Item, Request, Status
from cached_rag.engine.scheduler import Scheduler

_ONE_WAY = "this stream was begun in another way; make a new one"
# A prompt of more characters is long.
_LONG = 100_000


class Readers:
    """Threads that read prompts for event loops. Short prompts never wait for long ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, "read")
        self._long = ThreadPoolExecutor(1, "read-long")

    def submit(self, read: partial[None], size: int) -> None:
        """Have a prompt of `size` characters read."""
        (self._long if size > _LONG else self._short).submit(read)

    def forget(self) -> None:
        """Begin anew, in a forked child: the threads are the parent's."""
        self.__dict__.update(Readers().__dict__)


_READERS = Readers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_READERS.forget)


class Stream(Iterator[str]):
    """Pieces of an answer. Its attributes grow with it and are complete at its end.

    A stream that is dropped, or closed, or cancelled, stops generating.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler, self._request = scheduler, request
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # The request must not hold the stream, or dropping it would end nothing.
        request.deliver = self._items.put
        self._taking = threading.Lock()
        self._is_started = self._is_over = False
        self._is_driven = True
        self._is_async = False

    @property
    def report(self) -> Report:
        """What was done and how long it took."""
        return self._request.report

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return self._request.decoding.token_ids

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, see `Generation`."""
        return self._request.finish_reason or "length"

    def start(self) -> None:
        """Queue the request; taking the first piece does it too.

        Raises:
            BusyError: too many requests wait.
        """
        if not self._is_started:
            self._start(is_driven=not model_thread.is_here())

    def _start(self, *, is_driven: bool) -> None:
        self._is_started, self._is_driven = True, is_driven
        if not self._request.is_wanted:
            self._request.finish(Status.CANCELLED, None)
            return
        try:
            self._scheduler.submit(self._request)
        except BaseException:
            self._is_over = True
            raise
        read = partial(self._scheduler.read, self._request, is_driven=is_driven)
        if self._is_async:  # a loop has other things to do meanwhile
            _READERS.submit(read, len(self._request.planner.text))
        else:
            read()

    def __next__(self) -> str:
        with self._taking:
            if self._is_over:
                raise StopIteration
            if self._is_async:
                raise RuntimeError(_ONE_WAY)
            self.start()
            return self._checked(self._next_item())

    def _next_item(self) -> Item:
        if not self._is_driven and not model_thread.is_here():
            self._is_driven = True
            self._scheduler.drive(self._request)
        if self._is_driven:
            return self._items.get()
        while True:
            with suppress(queue.Empty):
                return self._items.get_nowait()
            self._scheduler.turn()

    def _checked(self, item: Item) -> str:
        if isinstance(item, str):
            return item
        self._is_over = True
        if item is None:
            raise StopIteration
        raise item

    def result(self) -> Generation:
        """The whole answer, if no piece was taken yet."""
        text = "".join(self)
        return Generation(text, tuple(self.token_ids), self.finish_reason, self.report)

    async def atext(self) -> str:
        """All pieces, without blocking the event loop; a cancelled task stops the generation."""
        async with aclosing(self.apieces()) as pieces:
            return "".join([piece async for piece in pieces])

    async def apieces(self) -> AsyncGenerator[str, None]:
        """Piece by piece, each when it is made; whoever stops asking stops the generation.

        Raises:
            RuntimeError: pieces were taken in another way before.
        """
        if self._is_started:
            raise RuntimeError(_ONE_WAY)
        self._is_async = True
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def deliver(item: Item) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._request.deliver = deliver
        self._start(is_driven=True)
        try:
            while isinstance(item := await items.get(), str):
                yield item
            if item is not None:
                raise item
        finally:
            self.cancel()  # without effect if the answer is complete
            self._is_over = True

    def close(self) -> None:
        """Stop generating, and wait until it has stopped; for any thread, at any time."""
        self.cancel()
        if self._is_async:  # its pieces go to the loop, where the last one is taken
            return
        with self._taking:
            while self._is_started and not self._is_over:
                self._is_over = not isinstance(self._next_item(), str)

    def cancel(self) -> None:
        """Let the answer end before its next token, without waiting for it."""
        self._request.is_wanted = False
        if self._is_started and not self._is_over:
            self._scheduler.cancel(self._request)

    def __del__(self) -> None:
        if getattr(self, "_is_started", False):
            self.cancel()
