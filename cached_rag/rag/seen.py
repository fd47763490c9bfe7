"""Tells by a file's size, times and place whether it is as it was when it was read."""

from __future__ import annotations

import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cached_rag.kv.fingerprint import digest
from cached_rag.rag.readers import is_built_in

# A file that changed so shortly before may change again without another time: clocks of file
# systems are coarse (FAT counts two seconds), and those of other machines differ.
_SETTLED_NS = 5 * 10**9
# What makes text of files; another version may make another one.
_READERS = ("cached-rag", "pypdf", "kreuzberg", "markdown-it-py", "docutils", "lxml", "openpyxl")


def stamp(file: Path) -> str:
    """The same text as long as a file does not change; empty if that cannot be told."""
    try:
        found = file.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        if time.time_ns() - max(times) < _SETTLED_NS or not is_built_in(file):
            return ""
        place = str(file.resolve())
    except OSError:
        return ""
    return digest(_readers(), place, *map(str, (found.st_size, found.st_ino, *times)))


@cache
def _readers() -> str:
    return " ".join(map(_version, _READERS))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
