"""A small file system of its own, that can be filled up or made read-only. Linux, as root."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SIZE = "16m"


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A file system in memory at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "none", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


@functools.cache
def can_mount() -> bool:
    """Whether this process may."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(Path(folder)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextlib.contextmanager
def full(folder: Path, left: int) -> Iterator[None]:
    """Fill a file system up to so many bytes; what filled it goes in the end."""
    room = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left)))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write into a file system, whatever is open already."""
    # What is open for writing keeps a mount writable, so another is laid over it.
    _run("mount", "--bind", str(folder), str(folder))
    _run("mount", "-o", "remount,bind,ro", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
