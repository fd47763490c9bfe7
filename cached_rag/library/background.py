"""Encodes in the background what a request missed, so that the next one hits.

Bounded, and never in the way of an answer: it starts on a module only while no request runs, and
takes one module at a time. What still waits when it is closed, or when the interpreter ends, is
done then, within a bound. Knows when; what to do it is given.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from cached_rag.backends.thread import before_end

_log = logging.getLogger(__name__)
_CAPACITY = 256
# A thread that waited for work would keep the model of its last task alive.
_IDLE_SECONDS = 1.0


class Activity:
    """What requests are under way."""

    def __init__(self) -> None:
        self._under_way: WeakSet[object] = WeakSet()  # who drops a request has ended it
        # Entered again where the collector ends an answer while its thread is in here.
        self._changed = threading.Condition(threading.RLock())

    def begin(self, request: object) -> None:
        """A request starts; if it has before, nothing changes."""
        with self._changed:
            self._under_way.add(request)

    def end(self, request: object) -> None:
        """A request is over; if it was before, nothing changes."""
        with self._changed:
            self._under_way.discard(request)
            self._changed.notify_all()

    def wait_idle(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until no request is under way, or there is to be no more waiting."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way or is_stopped())

    def wake(self) -> None:
        """Let those who wait look whether they are stopped."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class _Task:
    name: object
    work: Callable[[], object]
    lasts: bool


class WriteBack:
    """One thread, started with the first task, over a bounded queue of tasks.

    Attributes:
        dropped: tasks that found the queue full; a later request offers them again.
        finish_seconds: how long closing may go on with what waits; 0 drops it.
    """

    def __init__(
        self, activity: Activity, capacity: int = _CAPACITY, finish_seconds: float = 0.0
    ) -> None:
        self.dropped = 0
        self.finish_seconds = finish_seconds
        self._activity, self._capacity = activity, capacity
        self._tasks: deque[_Task] = deque()
        self._known: set[object] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        # Entered again where the collector ends an answer while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        _OPEN.add(self)

    def offer(self, name: object, work: Callable[[], object], *, lasts: bool = True) -> None:
        """Do something later; a name that is waiting already is not queued twice.

        Args:
            lasts: what it does outlives the process, so that it is worth finishing at the end.
        """
        with self._changed:
            if self._is_stopped or name in self._known:
                return
            if len(self._known) >= self._capacity:
                self.dropped += 1
                return
            self._known.add(name)
            self._tasks.append(_Task(name, work, lasts))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until everything offered so far is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._known)

    def close(self, finish_seconds: float | None = None) -> None:
        """Finish what runs, then what waits, for so long at most; log how much is left.

        Args:
            finish_seconds: None for the setting's.

        Raises:
            KeyboardInterrupt: the user would not wait; what waited is dropped.
        """
        seconds = self.finish_seconds if finish_seconds is None else finish_seconds
        self.finish(time.monotonic() + seconds)

    def finish(self, deadline: float) -> None:
        """As `close`; no task is begun after `deadline`, by `time.monotonic`.

        Done by the caller, for threads cannot be started any more when the interpreter ends.
        """
        try:
            self._stop()
            while time.monotonic() < deadline and (task := self._next()) is not None:
                self._do(task)
        finally:
            left = 0
            while (task := self._next()) is not None:
                self._over(task)
                left += 1
            if left and self.finish_seconds:
                _log.warning(
                    "%d known texts are left without KV at the end, for want of time (see "
                    "StoreConfig.finish_seconds); prompts that contain them offer them again",
                    left,
                )

    def _stop(self) -> None:
        """Let the thread end its task, and itself."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            thread = self._thread
        self._activity.wake()
        if thread is not None:
            thread.join()

    def _next(self) -> _Task | None:
        """The next task that is worth finishing."""
        while self._tasks:
            task = self._tasks.popleft()
            if task.lasts:
                return task
            self._over(task)
        return None

    def _run(self) -> None:
        while (task := self._taken()) is not None:
            self._do(task)
            del task

    def _taken(self) -> _Task | None:
        """The next task, as soon as nobody asks; None if there is none for a while, or no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_stopped, _IDLE_SECONDS)
            if not self._tasks:
                self._thread = None
                return None
        self._activity.wait_idle(self._is_ending)
        with self._changed:
            return None if self._is_ending() else self._tasks.popleft()

    def _is_ending(self) -> bool:
        """Whether what waits is left to `finish`, which comes when the main thread is over."""
        return self._is_stopped or not threading.main_thread().is_alive()

    def _do(self, task: _Task) -> None:
        try:
            task.work()
        except Exception as error:  # the thread must outlive a full disk or a bad module
            _log.warning("a missed module could not be written back: %s", error)
        finally:
            self._over(task)

    def _over(self, task: _Task) -> None:
        with self._changed:
            self._known.discard(task.name)
            self._changed.notify_all()


_OPEN: WeakSet[WriteBack] = WeakSet()


def _finish_all() -> None:
    """At the interpreter's end: all of them, their bounds counted from now."""
    found, now = list(_OPEN), time.monotonic()
    try:
        for one in found:
            one.finish(now + one.finish_seconds)
    except KeyboardInterrupt:
        for one in found:
            one.finish(now)


before_end(_finish_all)
if hasattr(os, "register_at_fork"):  # a child has neither the threads nor the locks' owners
    os.register_at_fork(after_in_child=_OPEN.clear)
