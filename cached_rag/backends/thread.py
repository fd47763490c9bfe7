"""Where torch computes: in the main thread, or in one thread for all others.

torch keeps a team of workers for every thread that ever computed, and as soon as there are more
workers than cores, none of them waits actively any more: on two cores decoding then takes 1.6
times as long, for good. Servers, `asyncio` and batches call from ever new threads; what they
compute goes through here. Knows no model.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class ModelThread:
    """One thread that does one task after the other, and ends once it has been idle for a while.

    A thread that ends takes its team of torch workers with it.
    """

    def __init__(self, idle_seconds: float = 1.0) -> None:
        """Start no thread yet.

        Args:
            idle_seconds: how long the thread waits for another task before it ends.
        """
        self._idle_seconds = idle_seconds
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        # Entered again where the collector ends an answer while its thread is in here.
        self._lock = threading.RLock()

    def run(self, work: Callable[[], T]) -> T:
        """Do it and wait for it: here, if this is the main thread or the model's own."""
        if self.is_here():
            return work()
        return self.submit(work).result()

    def is_here(self) -> bool:
        """Whether this thread may compute: the main one, or the model's."""
        here = threading.current_thread()
        return here is threading.main_thread() or here is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do it in the model's thread, behind what waits there.

        Raises:
            RuntimeError: the interpreter is ending.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the interpreter is ending; nothing is computed any more")
            self._tasks.put((work, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="model", daemon=True)
                self._thread.start()
        return done

    def close(self) -> None:
        """Let the thread finish its task and end; what waits behind that is cancelled.

        A thread that the interpreter ends in the midst of torch takes the process down.
        """
        with self._lock:
            self._is_closing = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put((lambda: None, Future()))
            thread.join()
        with suppress(queue.Empty):
            while True:
                _, left = self._tasks.get_nowait()
                left.cancel()

    def forget(self) -> None:
        """Begin anew, in a forked child: the thread is the parent's, and maybe what the lock is."""
        self.__dict__.update(ModelThread(self._idle_seconds).__dict__)

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                work, done = self._tasks.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if self._tasks.empty():
                        self._thread = None
                        return
                continue
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            del work, done  # else the last task's objects would live until the next
        with self._lock:
            self._thread = None


_SHARED = ModelThread()
atexit.register(_SHARED.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHARED.forget)
on_model_thread = _SHARED.run
submit = _SHARED.submit
is_here = _SHARED.is_here


def before_end(work: Callable[[], object]) -> None:
    """Have something done when the interpreter ends, while the model's thread still computes."""
    atexit.register(work)  # what is registered last is called first
