"""A real `cached-rag serve` in a process of its own, and what it takes of the machine."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
from load.figures import Watched

_COMMAND = "from cached_rag.cli.main import main; main()"


class Served:
    """The process, watched once a second while `watching`."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self._known = psutil.Process(process.pid)

    def look(self) -> Watched:
        """How it is now."""
        waiting = httpx.get(f"{self.address}/health", timeout=60).json()["waiting"]
        with self._known.oneshot():
            rss, files = self._known.memory_info().rss, self._known.num_fds()
            return Watched(rss, files, self._known.num_threads(), waiting)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Watched]]:
        """Yields a list that grows by an entry a second."""
        found: list[Watched] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1):
                with contextlib.suppress(httpx.HTTPError, psutil.Error):
                    found.append(self.look())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()

    def stop(self) -> float:
        """Send SIGTERM; returns after how many seconds it ended."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        return time.monotonic() - began


@contextlib.contextmanager
def served(model: str, folder: Path, options: Sequence[str]) -> Iterator[Served]:
    """A server on a free port; its log is in the folder."""
    command = [sys.executable, "-c", _COMMAND, "serve", "--model", model, "--name", "load"]
    command += ["--port", "0", "--store", str(folder / "kv"), *options]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, text=True)
    try:
        while not (found := re.search(r"at (http://\S+)/v1", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield Served(process, found[1])
    finally:
        process.kill()
        process.wait()
