"""What is made of models' files, in the user's cache directory: made once, checked at every use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash
from platformdirs import user_cache_path

from cached_rag.errors import ModelError
from cached_rag.kv.files import make_folder
from cached_rag.kv.fingerprint import digest

_log = logging.getLogger(__name__)
# A file is told from another by a sample: this many pages, evenly spread, of this many bytes each.
_PAGES, _PAGE = 64, 4096
_BLOCK = 1 << 22
_ABANDONED_S = 24 * 3600.0
# In each folder that is made: the checksums of its other files.
_SUMS = "checksums.json"


def cache_dir() -> Path:
    """The user's cache directory for this library (`CACHED_RAG_CACHE` overrides it), created.

    Raises:
        ModelError: it cannot be created.
    """
    path = _cache_path()
    with writing_cache():
        make_folder(path)
    return path


def _cache_path() -> Path:
    return Path(os.environ.get("CACHED_RAG_CACHE") or user_cache_path("cached-rag"))


@contextmanager
def writing_cache() -> Iterator[None]:
    """Inside this context, what the system refuses is to write to the cache directory.

    Raises:
        ModelError: it was refused.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's: transformers has OSErrors of its own
            raise
        raise ModelError(
            f"what is made of models' files cannot be kept in {_cache_path()} ({error}); make room "
            "there, or let CACHED_RAG_CACHE name another folder"
        ) from error


def made(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache directory. It is made anew if its files are not those that were made.

    Args:
        kind, name: the folder's place in the cache directory.
        make: writes the files into an empty folder.

    Raises:
        ModelError: it cannot be written.
        Else as `make`.
    """
    folder = cache_dir() / kind / name
    if folder.is_dir():
        if _is_sound(folder):
            return folder
        _log.warning("%s is damaged, and is made anew from the model's file", folder)
    with writing_cache():
        temporary = Path(tempfile.mkdtemp(dir=_swept(folder.parent)))
        try:
            make(temporary)
            (temporary / _SUMS).write_text(json.dumps(_sums(temporary)))
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _put(temporary: Path, folder: Path) -> None:
    """Move a folder to its place, unless another process has just put a sound one there."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        if not _is_sound(folder):
            shutil.rmtree(folder)
            temporary.rename(folder)


def _is_sound(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _SUMS).read_text()) == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    """The checksum of each file of a folder that was made, by its place in it."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: _checksum(path)
        for name, path in sorted(files.items())
        if name != _SUMS and path.is_file()
    }


def _checksum(path: Path) -> str:
    state = xxhash.xxh3_128()
    for block in _blocks(path):
        state.update(block)
    return str(state.hexdigest())


def _swept(folder: Path) -> Path:
    """A folder of the cache directory, made, without what killed processes left there.

    That has a name with `tmp`, and has not been changed for a day.
    """
    make_folder(folder)
    for path in folder.glob("tmp*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)
    return folder


def file_digest(path: Path) -> str:
    """blake2b digest of a file's bytes; read from the cache directory if the file is unchanged."""
    memo = cache_dir() / "digests" / f"{_identity(path)}.json"
    if memo.is_file():
        try:
            return str(json.loads(memo.read_text())["digest"])
        except (ValueError, KeyError):
            memo.unlink()
    state = hashlib.blake2b(digest_size=20)
    for block in _blocks(path):
        state.update(block)
    with writing_cache():
        make_folder(memo.parent)
        temporary = memo.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"digest": state.hexdigest(), "path": str(path)}))
        temporary.replace(memo)
    return state.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _identity(path: Path) -> str:
    """Changes whenever the file is replaced or changed, and needs only a sample of its bytes.

    No program can set the time of a file's last change of any kind (`ctime`). On file systems that
    do not keep it, the sample tells other weights apart.
    """
    stat = path.stat()
    facts = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
    last = max(0, stat.st_size - _PAGE)
    with path.open("rb") as file:
        pages = [_page(file, last * number // _PAGES) for number in range(_PAGES + 1)]
    return digest(str(path.resolve()), *map(str, facts), *pages)


def _page(file: BinaryIO, begin: int) -> bytes:
    file.seek(begin)
    return file.read(_PAGE)
