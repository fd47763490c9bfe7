"""Has documents read by another process, within limits of time and memory.

A parser cannot be trusted to end, nor to leave the machine some memory. So one process reads one
document after the other; it is ended, and another one begun, when a document goes beyond its
limits or breaks its parser. What comes back is JSON, which can do nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType

import psutil

from cached_rag.errors import ConfigError, DocumentError
from cached_rag.rag.document import Document
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.readers import is_built_in, load_document

# How often the process is looked at.
_LOOK_SECONDS = 0.05
# A process that has more memory after a document is not kept.
_KEPT_BYTES = 256 << 20
# Isolated: else it would import modules from the folder it is started in, which may be documents.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cached_rag.rag.reading_process import main; main()"
)


class ConfinedReader:
    """Reads documents within limits; a context, at whose end its process ends."""

    def __init__(self, limits: DocumentLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ConfinedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def load(self, path: Path | str) -> Document:
        """As `load_document`. Readers that an application added are called in this process.

        Raises:
            DocumentError: also if the document goes beyond its limits.
            ConfigError: no other process can be begun.
        """
        if not (self._limits.need_a_process and is_built_in(path)):
            return load_document(path, self._limits.max_bytes)
        wanted = {
            "path": str(Path(path).absolute()),
            "max_bytes": self._limits.max_bytes,
            "seconds": self._limits.seconds,
        }
        try:
            found = json.loads(self._answer(str(path), json.dumps(wanted).encode() + b"\n"))
        except BaseException:
            self._end()
            raise
        if self._process is not None and _resident(self._process.pid) > _KEPT_BYTES:
            self._end()  # what a parser has not given back is not the next document's
        if "error" in found:
            raise DocumentError(found["error"])
        parts = tuple((begin, known) for begin, known in found["parts"])
        return Document(str(path), found["title"], found["text"], parts, found["language"])

    def _answer(self, path: str, line: bytes) -> bytes:
        """What the process answers to a line.

        Raises:
            DocumentError: it takes too long or too much memory, or has died.
        """
        process = self._begun()
        answers: list[bytes] = []
        thread = Thread(target=_ask, args=(process, line, answers), daemon=True)
        thread.start()
        begin = time.monotonic()
        try:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
                self._check(path, process.pid, time.monotonic() - begin)
        except BaseException:
            process.kill()  # which ends the thread, too
            thread.join()
            raise
        if not (answers and answers[0].endswith(b"\n")):
            raise DocumentError(
                f"{path}: what reads it has died ({process.wait()}); repair or remove it"
            )
        return answers[0]

    def _check(self, path: str, pid: int, seconds: float) -> None:
        limits = self._limits
        if limits.seconds is not None and seconds > limits.seconds:
            raise DocumentError(
                f"{path}: takes more than {limits.seconds:g} s to read; remove or split it, or "
                "raise the limit (DocumentLimits, --parse-seconds)"
            )
        if limits.memory_bytes is not None and _resident(pid) > limits.memory_bytes:
            raise DocumentError(
                f"{path}: takes more than {limits.memory_bytes} bytes of memory to read; remove or "
                "split it, or raise the limit (DocumentLimits, --parse-memory)"
            )

    def _begun(self) -> subprocess.Popen[bytes]:
        """The process, begun if there is none."""
        if self._process is None:
            python = [sys.executable, "-I", "-W", "ignore", "-X", f"utf8={sys.flags.utf8_mode}"]
            try:
                self._process = subprocess.Popen(
                    [*python, "-c", _CODE, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, TypeError) as error:
                raise ConfigError(
                    f"no process to read documents in can be begun ({error}); read them in this "
                    "one, without limits: DocumentLimits(seconds=None, memory_bytes=None)"
                ) from error
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was written and never read cannot be flushed
                pipe.close()


def _ask(process: subprocess.Popen[bytes], line: bytes, answers: list[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):  # it has died
        process.stdin.write(line)
        process.stdin.flush()
        answers.append(process.stdout.readline())


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
