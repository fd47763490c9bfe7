"""Hands out an answer piece by piece, to a thread or to an event loop.

Knows the scheduler and its requests; knows no KV.
"""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial

from cached_rag.backends import thread as model_thread
from cached_rag.engine.decoding import Generation, TokenLogprobs
from cached_rag.engine.report import Report
from cached_rag.engine.request import Item, Request, Status
from cached_rag.engine.scheduler import Scheduler
from cached_rag.engine.trace import Trace, TraceSource

_ONE_WAY = (
    "pieces of this stream were taken in another way before (as an iterator, or asynchronously), "
    "and the two cannot be mixed; make a new stream"
)
# Prompts with more characters have a thread of their own to be read on.
_LONG = 100_000


# Threads that read the prompts of event loops, so that no loop is blocked: of short prompts, and
# of long ones, for which short ones so never wait.
_READERS: list[ThreadPoolExecutor] = []


def _start_readers() -> None:
    """Also in a forked child, which does not have the threads of its parent."""
    _READERS[:] = ThreadPoolExecutor(2, "read"), ThreadPoolExecutor(1, "read-long")


_start_readers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_readers)


class Stream(Iterator[str]):
    """An answer as an iterator of pieces of text. A stream is consumed once, in one way.

    Its attributes grow with the answer and are complete at its end. The model stops generating
    when the stream is closed, cancelled, or no longer referred to.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler, self._request = scheduler, request
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # The request must not refer to the stream: else a dropped stream would never be collected.
        request.deliver = self._items.put
        self._taking = threading.Lock()
        self._is_started = self._is_over = False
        self._is_async = False
        self._taken: list[str] = []

    @property
    def report(self) -> Report:
        """What was reused and computed so far, and how long it took."""
        return self._request.prompt.report

    @property
    def trace(self) -> Trace | None:
        """What became of each of the prompt's tokens; None before they have their KV."""
        source = self.trace_source
        return source.trace if source else None

    @property
    def trace_source(self) -> TraceSource | None:
        """What `trace` is made of, at any later time."""
        return self._request.prompt.trace_source

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens so far."""
        return self._request.decoding.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One for each token so far, if they were asked for."""
        return self._request.decoding.logprobs

    @property
    def finish_reason(self) -> str:
        """Why the answer ended; see `Generation`."""
        return self._request.finish_reason or "length"

    def start(self) -> None:
        """Queue the request now. Otherwise it is queued when the first piece is taken.

        Raises:
            BusyError: too many requests wait already.
        """
        if self._is_started:
            return
        self._is_started = True
        if not self._request.is_wanted:
            self._request.finish(Status.CANCELLED, None)
            return
        try:
            self._scheduler.submit(self._request)
        except BaseException as error:
            self._request.finish(Status.FAILED, error)  # whoever takes a piece later gets it, too
            raise
        read = partial(self._scheduler.read, self._request)
        if self._is_async:  # a loop has other things to do meanwhile
            short, long = _READERS
            text = self._request.prompt.asked.planner.text
            (long if len(text) > _LONG else short).submit(read)
        else:
            read()

    def __next__(self) -> str:
        with self._taking:
            if self._is_over:
                raise StopIteration
            if self._is_async:
                raise RuntimeError(_ONE_WAY)
            self.start()
            item = self._next_item()
            if isinstance(item, str):
                self._taken.append(item)
                return item
            self._is_over = True
            raise StopIteration if item is None else item

    def _next_item(self) -> Item:
        if not model_thread.is_here():
            self._scheduler.drive(self._request)  # if it was begun where the model may compute
            return self._items.get()
        while True:
            with suppress(queue.Empty):
                return self._items.get_nowait()
            self._scheduler.turn()

    def result(self) -> Generation:
        """The whole answer, whatever of it was taken already. Waits for its end.

        Raises:
            As `Engine.generate`.
        """
        for _ in self:
            pass
        return self.generation

    @property
    def generation(self) -> Generation:
        """The answer as far as it was taken."""
        text, ids, logprobs = "".join(self._taken), tuple(self.token_ids), tuple(self.logprobs)
        return Generation(text, ids, self.finish_reason, self.report, logprobs, self.trace_source)

    async def atext(self) -> str:
        """The whole text, without blocking the event loop. A cancelled task stops the answer."""
        async with aclosing(self.apieces()) as pieces:
            return "".join([piece async for piece in pieces])

    async def apieces(self) -> AsyncGenerator[str, None]:
        """The pieces, each as soon as it is certain. Leaving the loop stops the answer.

        Raises:
            RuntimeError: pieces were taken in another way before.
            As `Engine.generate`.
        """
        if self._is_started:
            raise RuntimeError(_ONE_WAY)
        self._is_async = True
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def deliver(item: Item) -> None:
            with suppress(RuntimeError):  # raised if the loop is closed, so that nobody waits
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._request.deliver = deliver
        self.start()
        try:
            while isinstance(item := await items.get(), str):
                self._taken.append(item)
                yield item
            if item is not None:
                raise item
        finally:
            self.cancel()  # changes nothing if the answer is complete
            self._is_over = True

    def close(self) -> None:
        """Stop generating, and wait until it has stopped. On any thread, at any time."""
        self.cancel()
        if self._is_async:  # the pieces go to the event loop, which must not be blocked here
            return
        with self._taking:
            while self._is_started and not self._is_over:
                self._is_over = not isinstance(self._next_item(), str)

    def cancel(self) -> None:
        """Stop generating before the next token, without waiting for that."""
        self._request.is_wanted = False
        if self._is_started and not self._is_over:
            self._scheduler.cancel(self._request)

    def __del__(self) -> None:
        if getattr(self, "_is_started", False):
            self.cancel()


class ToldStream(Stream):
    """An answer that no model makes: words that are there already."""

    def __init__(self, text: str, report: Report) -> None:
        self._pieces, self._report, self._is_started = iter([text]), report, True
        self._taken = [text]

    report = property(lambda self: self._report)
    trace_source = property(lambda _: None)
    token_ids = property(lambda _: [])
    logprobs = property(lambda _: [])
    finish_reason = property(lambda _: "stop")

    def __next__(self) -> str:
        return next(self._pieces)

    async def apieces(self) -> AsyncGenerator[str, None]:
        """The words."""
        for piece in self._pieces:
            yield piece

    def cancel(self) -> None:
        """Say nothing more."""
        self._pieces = iter(())

    close = cancel
