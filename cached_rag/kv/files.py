"""The files and folders that this library keeps: for their owner alone, and nothing but files.

Files that are being written lie in a folder of their own until they are complete (drafts). Whoever
writes holds a lock, which ends with the process. So while nobody holds it, all that lies in the
folder was left by processes that were killed. Knows no format.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from safetensors import SafetensorError

from cached_rag.errors import StoreError, StoreFullError

try:
    import fcntl
except ImportError:  # on Windows no draft is ever taken for abandoned
    fcntl = None  # type: ignore[assignment]

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Do not wait for a pipe's other end, do not follow a link; where the system has such flags.
_CAUTIOUS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _CAUTIOUS | getattr(os, "O_BINARY", 0)
# What opening a link or a socket comes to.
_NO_FILE = (errno.ELOOP, errno.ENXIO)
# What looking at a path comes to where nothing is.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, all for the owner alone; those that are there stay so.

    `Path.mkdir` gives a mode to the last one only.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def status_of(path: Path) -> os.stat_result | None:
    """What `Path.stat` says of a path; None if nothing is there.

    `Path.is_file` and its kin do not tell that from a folder that cannot be searched: they raise
    PermissionError, or from Python 3.14 on say no.

    Raises:
        StoreError: it cannot be known.
    """
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise StoreError(
            f"it is not known whether {path} is there ({error}); allow this user to search its "
            "folder and those above it, which belong to root if sudo made them"
        ) from error


def is_file(path: Path) -> bool:
    """Whether there is a file; raises as `status_of`."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; raises as `status_of`."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


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


class DraftFiles:
    """The folder of drafts, made when it is first needed, and the file that serves as its lock."""

    def __init__(self, folder: Path, lock: Path) -> None:
        self.folder, self._lock = folder, lock

    @contextlib.contextmanager
    def open(self) -> Iterator[Path]:
        """A path to write to, and to rename once all is written; else it is deleted.

        Raises:
            StoreFullError: the disk is full.
            StoreError: writing failed for another reason, or whatever the caller did here.
        """
        try:
            make_folder(self.folder)
            with self._locked("LOCK_SH"):
                draft = self.folder / os.urandom(8).hex()
                try:
                    yield draft
                finally:
                    draft.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise self._explained(error) from error

    @contextlib.contextmanager
    def abandoned(self) -> Iterator[list[Path]]:
        """Drafts whose writers were killed; none while anybody writes. No new one is begun here."""
        with contextlib.ExitStack() as stack:
            found: list[Path] = []
            if fcntl is not None:
                with contextlib.suppress(OSError):  # also where there is no folder yet
                    stack.enter_context(self._locked("LOCK_EX", "LOCK_NB"))
                    found = [] if self.folder.is_symlink() else sorted(self.folder.iterdir())
            yield [path for path in found if is_file(path) and not path.is_symlink()]

    @contextlib.contextmanager
    def _locked(self, *flags: str) -> Iterator[None]:
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | _CAUTIOUS, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(handle, sum(getattr(fcntl, flag) for flag in flags))
            yield
        finally:
            os.close(handle)

    def _explained(self, error: Exception) -> StoreError:
        if getattr(error, "errno", None) in _FULL or "No space left" in str(error):
            return StoreFullError(
                f"the disk that holds {self.folder.parent} is full; free some space, choose "
                "another place, or bound the store with disk_bytes (cached-rag store prune)"
            )
        return StoreError(
            f"KV could not be written to {self.folder.parent} ({error}); see that it can be, or "
            "choose another place"
        )
