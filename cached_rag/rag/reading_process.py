"""Has documents read by another process, within limits of time and memory.

A parser cannot be trusted to end, nor to leave the machine some memory. So one process reads one
document after the other; it is ended, and another one begun, when a document goes beyond its
limits or breaks its parser. What comes back is JSON, which can do nothing. The process knows no
secret of this one's environment, and imports nothing that lies among the documents. It takes a line
of JSON for each document, and gives one back; nothing that a parser prints gets to the terminal.
"""

from __future__ import annotations

import faulthandler
import json
import os
import site
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import psutil

from cached_rag.errors import ConfigError, DocumentError
from cached_rag.rag.document import Document, DocumentLimits, beyond, shown, too_long
from cached_rag.rag.readers import is_built_in, load_document

# How often the process is looked at.
_LOOK_SECONDS = 0.05
# How long a process that says no more may take to end.
_DYING_SECONDS = 5.0
# A process that has more memory after a document is not kept.
_KEPT_BYTES = 256 << 20
# Isolated, and this package is loaded from where it is: the folder around it may have documents.
_CODE = """
import importlib.util, json, sys
sys.path[:] = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("cached_rag", sys.argv[2])
sys.modules["cached_rag"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["cached_rag"])
from cached_rag.rag.reading_process import main
main()
"""
_PACKAGE = Path(__file__).parents[1] / "__init__.py"
# All else may be a secret.
_ENVIRONMENT = (
    *("HOME", "USERPROFILE", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT"),
    *("WINDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
)
# Where a program looks for the folder of its temporary files.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
# Most bytes of a character in JSON, and of all else in an answer. Whatever a parser does to its
# process, no more is read.
_CHARACTER_BYTES, _ANSWER_BYTES = 12, 1 << 20
# By so many seconds later than its watcher would a process ends itself, should that be gone.
_GRACE = 30.0


class ConfinedReader:
    """Reads documents within limits; a context, at whose end its process ends."""

    def __init__(self, limits: DocumentLimits, documents: Path) -> None:
        """Begin no process yet.

        Args:
            documents: the file or folder that is read. Nothing outside is.
        """
        self._limits = limits
        self._inside = documents.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        # The process, and a folder for its copies; its own, so that what it leaves behind goes.
        self._owned = ExitStack()

    def __enter__(self) -> ConfinedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def load(self, path: Path | str) -> Document:
        """As `load_document`. Readers that an application added are called in this process.

        Raises:
            DocumentError: also if the document goes beyond its limits.
            ConfigError: no other process can be begun.
        """
        limits = self._limits
        is_limited = (limits.parse_seconds, limits.parse_memory_bytes) != (None, None)
        if not (is_limited and is_built_in(path)):
            return load_document(path, limits, self._inside)
        wanted = {
            "path": str(Path(path).absolute()),
            "limits": vars(limits),
            "inside": str(self._inside),
        }
        try:
            found = json.loads(self._answer(path, json.dumps(wanted).encode() + b"\n"))
        except BaseException:
            self._end()
            raise
        if self._process is not None and _resident(self._process.pid) > _KEPT_BYTES:
            self._end()  # what a parser has not given back is not the next document's
        if "error" in found:
            raise DocumentError(found["error"])
        parts = tuple((begin, known) for begin, known in found["parts"])
        return Document(**found | {"source": str(path), "parts": parts})

    def _answer(self, path: Path | str, line: bytes) -> bytes:
        """What the process answers to a line.

        Raises:
            DocumentError: it takes too long or too much memory, says too much, or has died.
        """
        process = self._begun()
        answers: list[bytes] = []
        most_bytes = _CHARACTER_BYTES * self._limits.max_characters + _ANSWER_BYTES
        thread = Thread(target=_ask, args=(process, line, most_bytes, answers), daemon=True)
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
        [answer] = answers or [b""]
        if len(answer) >= most_bytes:
            raise DocumentError(f"{shown(path)}: {too_long(self._limits.max_characters)}")
        if not answer.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):  # a parser may have closed its output
                process.wait(_DYING_SECONDS)
            self._end()
            raise DocumentError(
                f"{shown(path)}: what reads it has died ({process.returncode}); repair or remove it"
            )
        return answer

    def _check(self, path: Path | str, pid: int, passed: float) -> None:
        limits = self._limits
        if limits.parse_seconds is not None and passed > limits.parse_seconds:
            said = f"takes more than {limits.parse_seconds:g} s to read"
            raise beyond("parse_seconds", f"{shown(path)}: {said}")
        if limits.parse_memory_bytes is not None and _resident(pid) > limits.parse_memory_bytes:
            said = f"takes more than {limits.parse_memory_bytes} bytes of memory to read"
            raise beyond("parse_memory_bytes", f"{shown(path)}: {said}")

    def _begun(self) -> subprocess.Popen[bytes]:
        """The process, begun if there is none."""
        if self._process is None:
            python = [sys.executable, "-I", "-W", "ignore", "-X", f"utf8={sys.flags.utf8_mode}"]
            modules = json.dumps(trusted_path(self._inside))
            try:
                copies = self._owned.enter_context(TemporaryDirectory(prefix="cached-rag-"))
                known = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
                process = subprocess.Popen(
                    [*python, "-c", _CODE, modules, str(_PACKAGE)],
                    cwd=copies,
                    env=known | dict.fromkeys(_TEMPORARY, copies),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, TypeError) as error:
                raise ConfigError(
                    f"no process to read documents in can be begun ({error}); read them in this "
                    "one, without limits: parse_seconds=None, parse_memory_bytes=None"
                ) from error
            # What was written and never read cannot be flushed.
            self._owned.enter_context(suppress(OSError))
            self._process = self._owned.enter_context(process)
            self._owned.callback(process.kill)
        return self._process

    def _end(self) -> None:
        self._process = None
        self._owned.close()


def _ask(
    process: subprocess.Popen[bytes], line: bytes, most_bytes: int, answers: list[bytes]
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # it has died; or Ctrl-C came, and closed its pipes
        process.stdin.write(line)
        process.stdin.flush()
        answers.append(process.stdout.readline(most_bytes))


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def trusted_path(documents: Path) -> list[str]:
    """This process's `sys.path` for a process that works on documents.

    Without the current folder, whatever spells it, and without folders at, below or above the
    documents: a document may be called `kreuzberg.py`, and a folder of documents `docutils`. The
    interpreter's own folders stay, even if they lie there: this process runs what is in them.

    Args:
        documents: the file or folder.
    """
    folder = documents.resolve()
    folder = folder if folder.is_dir() else folder.parent
    installed = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = [installed[name] for name in names] + site.getsitepackages()
    own.append(site.getusersitepackages())
    resolved = [Path(name).resolve() for name in own]

    def is_trusted(entry: str) -> bool:
        if not (isinstance(entry, str) and Path(entry).is_absolute()):
            return False
        place = Path(entry).resolve()
        if any(place.is_relative_to(one) for one in resolved):
            return True
        is_near = place.is_relative_to(folder) or folder.is_relative_to(place)
        return not is_near and place != _current()

    return [entry for entry in sys.path if is_trusted(entry)]


def _current() -> Path | None:
    try:
        return Path.cwd().resolve()
    except OSError:  # somebody removed it
        return None


def _leave() -> None:
    """Remove this process's own folder, as who asked cannot if it was killed."""
    with suppress(OSError):
        os.rmdir(os.getcwd())


def main() -> None:
    """Read documents until there is nobody who asks."""
    with (
        ExitStack() as leaving,
        os.fdopen(os.dup(1), "w", encoding="ascii") as answers,
        open(os.devnull, "w") as nothing,
    ):
        leaving.callback(_leave)
        os.dup2(nothing.fileno(), 1)
        for line in sys.stdin:
            wanted = json.loads(line)
            limits = DocumentLimits(**wanted["limits"])
            if limits.parse_seconds is not None:
                late = limits.parse_seconds + _GRACE
                faulthandler.dump_traceback_later(late, exit=True, file=nothing)
            try:
                found = vars(load_document(wanted["path"], limits, Path(wanted["inside"])))
            except DocumentError as error:
                found = {"error": str(error)}
            answers.write(json.dumps(found) + "\n")
            answers.flush()
            faulthandler.cancel_dump_traceback_later()
