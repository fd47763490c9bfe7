"""Opens the file that was found, and no other one: somebody may put a link in its place meanwhile.

What parsers get is a copy, as they open a file by its name, and some do so several times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cached_rag.errors import DocumentError
from cached_rag.rag.naming import shown

# Through no link, and without waiting for whoever would write into a pipe. Windows lacks these.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


@contextmanager
def private_copy(path: Path, inside: Path, max_bytes: int) -> Iterator[Path]:
    """A copy of a file, of its name, that lasts as long as the context does.

    Args:
        inside: the file itself, or a folder in which it lies; with all links followed.

    Raises:
        DocumentError: the path leads elsewhere, to what is no file, or to a larger one.
        OSError: it cannot be read.
    """
    with TemporaryDirectory(prefix="cached-rag-") as folder:
        copy = Path(folder, path.name)
        with open(_descriptor(path, inside), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DocumentError(f"{shown(path)}: is no file, but a folder, pipe or device")
            data = b"" if found.st_size > max_bytes else file.read(max_bytes + 1)
            size = max(found.st_size, len(data))
        if size > max_bytes:
            raise DocumentError(
                f"{shown(path)}: {size} bytes exceed {max_bytes}; split the file, or raise the "
                "limit (max_document_bytes=, --max-document-bytes)"
            )
        copy.write_bytes(data)
        yield copy


def _descriptor(path: Path, inside: Path) -> int:
    """The file, opened where it really lies: from folder to folder, none of which is a link.

    Raises:
        DocumentError: it does not lie in `inside`.
    """
    target = path.resolve(strict=True)
    is_found = target == inside or (
        target.is_relative_to(inside) and target.suffix.lower() == path.suffix.lower()
    )
    if not is_found:
        raise DocumentError(
            f"{shown(path)}: leads out of {shown(inside)}, or to a file of another kind; put the "
            "file there, and no link"
        )
    if os.open not in os.supports_dir_fd:  # Windows
        return _looked_at_again(os.open(target, _FLAGS), path, target)
    start = inside.parent if target == inside else inside
    here = os.open(start, os.O_RDONLY)
    for name in target.relative_to(start).parts:
        try:
            below = os.open(name, _FLAGS, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _looked_at_again(descriptor: int, path: Path, target: Path) -> int:
    if path.resolve() == target and os.path.samestat(os.fstat(descriptor), os.lstat(target)):
        return descriptor
    os.close(descriptor)
    raise DocumentError(f"{shown(path)}: another file was put in its place; read it again")
