"""Calls what a model's files say, such as its chat template, within bounds of time and memory.

A template runs in a sandbox, which nested loops make run for years and doubled texts fill the
memory from. Whoever renders is watched from another thread, and stopped. Knows no template.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import psutil

from cached_rag.errors import ConfigError

# A prompt is rendered in milliseconds; a slow machine that does much else needs some seconds.
SECONDS = 20.0
# What a prompt of tens of millions of characters takes.
_BYTES = 1 << 30
# How often it is looked at; most calls are over before the first time.
_LOOK_SECONDS = 0.1


class _Stopped(BaseException):
    """Raised in the thread that is watched; no handler of errors of the work catches it."""


def bounded(what: str, work: Callable[[], str]) -> str:
    """What `work` returns. It must run no locks and change nothing, as it may end anywhere.

    It is stopped between two steps of Python: a single one, such as a text times a number, ends
    first.

    Args:
        what: says what works here, as in "the model's chat template".

    Raises:
        ConfigError: it takes too long, or the process grows too much meanwhile.
        As `work` does.
    """
    is_over, lock, reasons = threading.Event(), threading.Lock(), list[str]()
    arguments = (threading.get_ident(), is_over, lock, reasons)
    watch = threading.Thread(target=_watch, args=arguments, daemon=True)
    try:
        try:
            watch.start()
            found = work()
        finally:
            with lock:  # then nothing is raised here any more
                is_over.set()
    except _Stopped as error:
        raise ConfigError(
            f"{what} {reasons[0]} and was stopped; give the prompt as one string, or use another "
            "template or model"
        ) from error
    return found


def _watch(thread: int, is_over: threading.Event, lock: threading.Lock, reasons: list[str]) -> None:
    """Stop a thread once it has worked too long or taken too much memory."""
    memory, begin = psutil.Process().memory_info, time.monotonic()
    before: int | None = None
    while not is_over.wait(_LOOK_SECONDS):
        before = memory().rss if before is None else before
        if time.monotonic() - begin > SECONDS:
            reasons.append(f"takes more than {SECONDS:g} s")
        elif memory().rss - before > _BYTES:
            reasons.append(f"takes more than {_BYTES} bytes of memory")
        else:
            continue
        with lock:
            if not is_over.is_set():
                stop = ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), stop)
        return
