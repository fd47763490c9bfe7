"""The one thread that computes for all but the main one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fresh import run_fresh

from cached_rag.backends.thread import ModelThread, join, on_model_thread, submit

pytestmark = pytest.mark.slow


def test_model_thread_is_one_for_all_but_the_main_thread():
    seen = set()
    thread = ModelThread()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: thread.run(lambda: seen.add(threading.get_ident())), range(8)))
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    assert thread.run(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()


def test_model_thread_ends_when_idle():
    thread = ModelThread(idle_seconds=0.01)
    first = thread.submit(threading.current_thread).result()
    deadline = time.monotonic() + 5
    while first.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not first.is_alive()
    assert thread.submit(threading.current_thread).result() is not first


def test_model_thread_ends_before_the_interpreter():
    code = """
import threading, time, torch
from cached_rag.backends.thread import submit
matrix = torch.randn(600, 600)
def work():
    for _ in range(60):
        matrix @ matrix
submit(work)
submit(lambda: time.sleep(60))  # is never begun
time.sleep(0.05)
"""
    done = run_fresh(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_waits_for_a_thread_on_the_model_thread_does_what_it_submits():
    threads = []

    def background():
        on_model_thread(lambda: threads.append(threading.current_thread().name))

    def closes():
        other = threading.Thread(target=background)
        other.start()
        join(other)
        threads.append(threading.current_thread().name)

    submit(closes).result(timeout=20)  # it would wait for itself
    assert threads == ["model", "model"]
    background()
    assert threads[-1] == "MainThread"
