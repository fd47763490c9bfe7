"""Encodes in the background what a request missed, so that the next one hits.

Bounded, and never in the way of an answer: it starts on a module only while no request runs, and
takes one module at a time. Knows when; what to do it is given.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)
_CAPACITY = 256
# A thread that waited for work would keep the model of its last task alive.
_IDLE_SECONDS = 1.0


class Activity:
    """How many requests are under way."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def begin(self) -> Callable[[], None]:
        """A request starts; returns what ends it, which may be called more than once."""
        with self._changed:
            self._count += 1
        done = threading.Event()

        def end() -> None:
            with self._changed:
                if not done.is_set():
                    done.set()
                    self._count -= 1
                    self._changed.notify_all()

        return end

    def wait_idle(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until no request is under way, or there is to be no more waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0 or is_stopped())

    def wake(self) -> None:
        """Let those who wait look whether they are stopped."""
        with self._changed:
            self._changed.notify_all()


class WriteBack:
    """One thread, started with the first task, over a bounded queue of tasks.

    Attributes:
        dropped: tasks that found the queue full; a later request offers them again.
    """

    def __init__(self, activity: Activity, capacity: int = _CAPACITY) -> None:
        self.dropped = 0
        self._activity = activity
        self._tasks: queue.Queue[tuple[object, Callable[[], object]]] = queue.Queue(capacity)
        self._known: set[object] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        # Entered again where the collector ends an answer while its thread is in here.
        self._lock = threading.RLock()

    def offer(self, name: object, task: Callable[[], object]) -> None:
        """Do something later; a name that is waiting already is not queued twice."""
        with self._lock:
            if name in self._known:
                return
            try:
                self._tasks.put_nowait((name, task))
            except queue.Full:
                self.dropped += 1
                return
            self._known.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until everything offered so far is done."""
        self._tasks.join()

    def close(self) -> None:
        """Drop what waits, finish what runs."""
        self._is_stopped = True  # what waits is skipped from now on
        self._activity.wake()
        self._tasks.join()

    def _run(self) -> None:
        while True:
            try:
                name, task = self._tasks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._tasks.empty():
                        self._thread = None
                        return
                continue
            try:
                self._activity.wait_idle(lambda: self._is_stopped)
                if not self._is_stopped:
                    task()
            except Exception as error:  # the thread must outlive a full disk or a bad module
                _log.warning("a missed module could not be written back: %s", error)
            finally:
                with self._lock:
                    self._known.discard(name)
                self._tasks.task_done()
            del name, task
