"""One module as one safetensors file: written whole or not at all, checked when read.

Knows the file format; knows no index and no eviction.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cached_rag.errors import CorruptBlobError, StoreFullError
from cached_rag.kv import ModuleKV
from cached_rag.store.codecs import Codec, Tensors

_IDS = "token_ids"


@dataclass(frozen=True)
class BlobInfo:
    """What the index keeps of a file: its size in bytes and its tensors' checksum."""

    nbytes: int
    checksum: str


def write_blob(path: Path, key: str, kv: ModuleKV, codec: Codec) -> BlobInfo:
    """Write a module under a temporary name, then rename it.

    Raises:
        StoreFullError: the disk is full; nothing is left behind.
    """
    tensors = codec.encode(kv) | {_IDS: torch.tensor(kv.token_ids, dtype=torch.int32)}
    header = {
        "key": key,
        "codec": codec.name,
        "start": str(kv.start),
        "dtype": str(kv.keys.dtype).removeprefix("torch."),
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        save_file(tensors, str(temporary), header)
        info = BlobInfo(temporary.stat().st_size, checksum(tensors))
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise StoreFullError(
                f"the disk that holds {path.parent} is full; free some space, choose another "
                "place, or bound the store with disk_bytes (cached-rag store prune)"
            ) from error
        raise
    return info


def read_blob(
    path: Path, key: str, token_ids: Sequence[int] | None, codec: Codec, expected: str | None
) -> ModuleKV | None:
    """Map a module's file into memory; None if there is no file.

    Args:
        token_ids: what it must hold; None takes what is there.
        expected: the checksum its tensors must have; None skips reading them.

    Raises:
        CorruptBlobError: damaged, or not what it should be. The file is left as it is.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        raise CorruptBlobError(_message(path, f"it cannot be read ({error})")) from error
    if header.get("key") != key or header.get("codec") != codec.name:
        raise CorruptBlobError(_message(path, "it belongs to another module or codec"))
    if expected is not None and checksum(tensors) != expected:
        raise CorruptBlobError(_message(path, "its content does not match its checksum"))
    try:
        held = tuple(tensors.pop(_IDS).tolist())
        kv = codec.decode(tensors, held, int(header["start"]), getattr(torch, header["dtype"]))
    except (KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptBlobError(_message(path, f"its layout is wrong ({error})")) from error
    if token_ids is not None and held != tuple(token_ids):
        raise CorruptBlobError(_message(path, "it holds other tokens than its key stands for"))
    return kv


def checksum(tensors: Tensors) -> str:
    """xxh3-128 over names and bytes: guards against damage, not against malice."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return str(state.hexdigest())


def _message(path: Path, reason: str) -> str:
    return f"the KV file {path} is damaged or foreign: {reason}. It is dropped from the store."
