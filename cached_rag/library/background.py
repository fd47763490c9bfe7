"""Runs work in the background while no request does: encoding chunks that requests missed.

The queue is bounded. One chunk is encoded at a time, and only begun while no request is under way,
so a request waits for one chunk at most. Tasks that still wait when the engine is closed, or when
the interpreter ends, are done then, for a bounded time. Knows when to do a task, not what it does.
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

from cached_rag.backends.thread import before_end, join

_log = logging.getLogger(__name__)
_CAPACITY = 256
# The thread ends after so long without work: as long as it lives, so does the engine's model.
_IDLE_SECONDS = 1.0


class Activity:
    """The requests that are under way. Safe for several threads."""

    def __init__(self) -> None:
        self._under_way: WeakSet[object] = WeakSet()  # a request that is dropped is over, too
        # Reentrant: the garbage collector may end a request, and so come back, at any point.
        self._changed = threading.Condition(threading.RLock())

    def begin(self, request: object) -> None:
        """Note that a request has begun. Doing it again changes nothing."""
        with self._changed:
            self._under_way.add(request)

    def end(self, request: object) -> None:
        """Note that a request is over. Doing it again changes nothing."""
        with self._changed:
            self._under_way.discard(request)
            self._changed.notify_all()

    def wait_idle(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until no request is under way, or until `is_stopped` says so; see `wake`."""
        with self._changed:
            while self._under_way and not is_stopped():
                self._changed.wait(_IDLE_SECONDS)  # nobody notifies of a request that is dropped

    def wake(self) -> None:
        """Have all threads in `wait_idle` ask `is_stopped` again."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class _Task:
    name: object
    work: Callable[[], object]
    lasts: bool


class WriteBack:
    """A bounded queue of tasks, and one thread that does them. Safe for several threads.

    Attributes:
        dropped: number of tasks that were not queued because the queue was full. A later request
            that misses the same chunk offers its task again.
        finish_seconds: how long `close` may go on with tasks that wait; 0 drops them.
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
        # Reentrant: the garbage collector may end a request, and so come back, at any point.
        self._changed = threading.Condition(threading.RLock())
        _OPEN.add(self)

    def offer(
        self,
        name: object,
        work: Callable[[], object],
        *,
        lasts: bool = True,
        is_begun: bool = False,
    ) -> None:
        """Queue a task. If the queue is full, or closed, the task is dropped.

        Args:
            name: identifies the task; a name that is in the queue already is not added again.
            work: the task.
            lasts: its result outlives the process, so it is worth doing even when the engine is
                being closed.
            is_begun: it goes on with what another task has begun, and holds memory for it; so it
                comes before all others.
        """
        with self._changed:
            if self._is_stopped or name in self._known:
                return
            if len(self._known) >= self._capacity:
                self.dropped += 1
                return
            self._known.add(name)
            place = self._tasks.appendleft if is_begun else self._tasks.append
            place(_Task(name, work, lasts))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until all tasks that were offered so far are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._known)

    def close(self, finish_seconds: float | None = None) -> None:
        """Finish the running task, then begin waiting ones until the time is over.

        The rest is dropped, and its number is logged.

        Args:
            finish_seconds: None for the attribute's value.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; all waiting tasks are dropped.
        """
        seconds = self.finish_seconds if finish_seconds is None else finish_seconds
        self.finish(time.monotonic() + seconds)

    def finish(self, deadline: float) -> None:
        """As `close`, up to a point in time.

        The tasks are done on the caller's thread: no thread can be started while the interpreter
        ends.

        Args:
            deadline: no task is begun later, by `time.monotonic`.
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
                    "%d chunk(s) were not encoded, because there was no time left (see "
                    "StoreConfig.finish_seconds); the next prompts that contain them will have "
                    "them encoded",
                    left,
                )

    def _stop(self) -> None:
        """Take no more tasks, and wait until the thread has finished the one it does."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            thread = self._thread
        self._activity.wake()
        if thread is not None:
            join(thread)

    def _next(self) -> _Task | None:
        """The next task whose result lasts; the others before it are dropped."""
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
        """The next task, once no request is under way; None if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_stopped, _IDLE_SECONDS)
            if not self._tasks:
                self._thread = None
                return None
        self._activity.wait_idle(self._is_ending)
        with self._changed:
            return None if self._is_ending() else self._tasks.popleft()

    def _is_ending(self) -> bool:
        """Whether waiting tasks are left to `finish`, as when the main thread has ended."""
        return self._is_stopped or not threading.main_thread().is_alive()

    def _do(self, task: _Task) -> None:
        try:
            task.work()
        except Exception as error:  # such as a full disk; the thread must go on with other tasks
            _log.warning("a chunk could not be encoded in the background: %s", error)
        finally:
            self._over(task)

    def _over(self, task: _Task) -> None:
        with self._changed:
            self._known.discard(task.name)
            self._changed.notify_all()


_OPEN: WeakSet[WriteBack] = WeakSet()


def _finish_all() -> None:
    """At the interpreter's end, finish every queue, each for its own `finish_seconds` from now."""
    found, now = list(_OPEN), time.monotonic()
    try:
        for one in found:
            one.finish(now + one.finish_seconds)
    except KeyboardInterrupt:
        for one in found:
            one.finish(now)


before_end(_finish_all)
if hasattr(os, "register_at_fork"):  # a child has not the threads, and locks may be held forever
    os.register_at_fork(after_in_child=_OPEN.clear)
