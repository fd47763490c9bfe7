"""What the machine has to give: descriptors to share out, room on the disk. Knows no server."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

# As many as a server may need; systems allow for more than their kernels like.
_WANTED = (65536, 10240)
# The model's files, the first store's databases, logs, and some to spare.
_SPARED = 128
# Two databases, of three files each.
_FILES_OF_A_SPACE = 6
_MOST_SPACES = 320


@dataclass(frozen=True)
class Share:
    """How the descriptors are used.

    Attributes:
        connections: most of them at once.
        spaces: most engines of tenants and salts that are open at once.
    """

    connections: int
    spaces: int


def share_descriptors(connections: int) -> Share:
    """Let this process open as many files as it may, and say what for.

    Args:
        connections: more of them than that are not wanted.
    """
    half = max(32, (_raise_limit() - _SPARED) // 2)
    return Share(min(connections, half), min(_MOST_SPACES, half // _FILES_OF_A_SPACE))


def _raise_limit() -> int:
    """The most files that may be open, after it was raised."""
    if sys.platform == "win32":  # which has no such limit on sockets
        return _WANTED[0]
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(OSError, ValueError):  # the kernel allows for less
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
    return _WANTED[0] if soft == resource.RLIM_INFINITY else soft


def default_disk_bytes(folder: Path) -> int:
    """A bound for a store in that folder: what it has, and half of what is free there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    kept = sum(map(_size, folder.glob("blobs/*/*")))
    return kept + max(1, shutil.disk_usage(there).free // 2)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        return path.stat().st_size
    return 0
