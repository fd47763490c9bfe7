"""The files and folders that this library keeps: for their owner alone, and nothing but files."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

# Do not wait for a pipe's other end, do not follow a link; where the system has such flags.
CAUTIOUS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | CAUTIOUS | getattr(os, "O_BINARY", 0)
# What opening a link or a socket comes to.
_NO_FILE = (errno.ELOOP, errno.ENXIO)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, all for the owner alone; those that are there stay so.

    `Path.mkdir` gives a mode to the last one only.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading, without waiting for what is none.

    Raises:
        OSError: it cannot be opened, which says nothing about what is in it.
        ValueError: it is a pipe, a device, a folder, a socket or a link.
    """
    try:
        handle = os.open(path, _READ)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ValueError("it is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no regular file")
    return os.fdopen(handle, "rb")
