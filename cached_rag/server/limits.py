"""How much of the machine a server may use: files, memory and disk. Knows no server."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

# Descriptors to ask for, the larger number first: some systems name a limit and grant less.
_WANTED = (65536, 10240)
# Descriptors for the model's files, the first store's databases, logs, and a few to spare.
_SPARED = 128
# A space (the engine of one tenant or salt) has two databases, of three files each.
_FILES_OF_A_SPACE = 6
_MOST_SPACES = 320


@dataclass(frozen=True)
class Share:
    """How many descriptors are used for what.

    Attributes:
        connections: most connections at once.
        spaces: most engines of tenants and salts that are open at once.
    """

    connections: int
    spaces: int


def share_descriptors(connections: int) -> Share:
    """Raise this process's limit of open files as far as it may be, and share it out.

    Args:
        connections: how many are wanted; there may be fewer.
    """
    half = max(32, (_raise_limit() - _SPARED) // 2)
    return Share(min(connections, half), min(_MOST_SPACES, half // _FILES_OF_A_SPACE))


def _raise_limit() -> int:
    """Raise the limit; returns how many files may be open now."""
    if sys.platform == "win32":  # there is no such limit on sockets
        return _WANTED[0]
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(OSError, ValueError):  # the kernel grants less
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
    return _WANTED[0] if soft == resource.RLIM_INFINITY else soft


def default_disk_bytes(folder: Path) -> int:
    """A bound for a store in a folder: what it has now, and half of what the disk has free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    kept = sum(map(_size, folder.glob("blobs/*/*")))
    return kept + max(1, shutil.disk_usage(there).free // 2)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        return path.stat().st_size
    return 0
