"""The threads in which torch computes: the main thread, and one thread for all other callers.

torch keeps a team of worker threads for every thread that has ever computed. As soon as there are
more workers than cores, idle workers sleep instead of spinning: on two cores decoding then takes
1.6 times as long, until the process ends. Servers, `asyncio` and batches call from many threads,
so this module hands their work to one thread. Knows no model.
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
# How often the model's thread looks whether a thread that it waits for has ended.
_GLANCE_SECONDS = 0.05


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
        # Reentrant: the garbage collector may close an answer, which submits work, while its
        # thread holds this lock.
        self._lock = threading.RLock()

    def run(self, work: Callable[[], T]) -> T:
        """Do the work and return its result; in this thread, if it may compute."""
        if self.is_here():
            return work()
        return self.submit(work).result()

    def is_here(self) -> bool:
        """Whether the calling thread may compute: it is the main thread or the model's thread."""
        here = threading.current_thread()
        return here is threading.main_thread() or here is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue the work for the model's thread; the future gives its result or its error.

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

    def join(self, thread: threading.Thread) -> None:
        """Wait until another thread has ended; in the model's thread, do what it submits."""
        if threading.current_thread() is not self._thread:
            thread.join()
            return
        while thread.is_alive():
            with suppress(queue.Empty):
                _settle(*self._tasks.get(timeout=_GLANCE_SECONDS))

    def close(self) -> None:
        """Let the thread finish its current task and end; cancel the tasks that wait.

        Called before the interpreter ends, which would crash if the thread were still in torch.
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
        """Start afresh in a forked child: the thread is not there, and the lock may be held."""
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
            _settle(work, done)
            del work, done  # or they would keep their objects alive until the next task
        with self._lock:
            self._thread = None


def _settle(work: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


_SHARED = ModelThread()
atexit.register(_SHARED.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHARED.forget)
on_model_thread = _SHARED.run
submit = _SHARED.submit
is_here = _SHARED.is_here
join = _SHARED.join


def before_end(work: Callable[[], object]) -> None:
    """Register work for the interpreter's end, to be done while the model's thread still runs."""
    atexit.register(work)  # atexit calls the last one registered first, so before `_SHARED.close`
