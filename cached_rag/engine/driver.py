"""Has the model's thread make the turns of those answers that nobody else makes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cached_rag.backends import thread as model_thread
from cached_rag.engine.request import Request

_log = logging.getLogger(__name__)


class Driver:
    """Makes turns on the model's thread while it has requests that are not over."""

    def __init__(
        self, turn: Callable[[], object], fail_all: Callable[[BaseException], object]
    ) -> None:
        """Drive nothing yet.

        Args:
            turn: makes one turn.
            fail_all: ends all requests, if a turn failed as a whole.
        """
        self._turn, self._fail_all = turn, fail_all
        self._lock = threading.Lock()
        self._driven: set[Request] = set()
        self._is_driving = False

    def add(self, request: Request) -> None:
        """Make this request's answer from now on."""
        with self._lock:
            self._driven.add(request)
            if not self._is_driving:
                self._is_driving = True
                model_thread.submit(self._drive)

    def _drive(self) -> None:
        """Make one turn, and queue the next; in between the thread is free for other work."""
        try:
            self._turn()
        except BaseException as error:  # else whoever waits for an answer would wait forever
            _log.exception("a turn failed; all requests fail with it")
            self._fail_all(error)
        with self._lock:
            self._driven = {request for request in self._driven if not request.status.is_over}
            self._is_driving = bool(self._driven)
            if self._is_driving:
                model_thread.submit(self._drive)
