"""One module as one safetensors file: written whole or not at all, checked when read.

Every layer has its own checksum, so that a layer can be used before the next one is read. Knows
the file format; knows no index and no eviction.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cached_rag.errors import CorruptBlobError, StoreFullError
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store.codecs import Codec, Tensors

_IDS = "token_ids"
_DAMAGED = "its content does not match its checksum"


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
    tensors = codec.encode(kv)
    ids = torch.tensor(kv.token_ids, dtype=torch.int32)
    sums = layer_sums(tensors)
    header = {
        "layers": ",".join(sums),
        "key": key,
        "codec": codec.name,
        "start": str(kv.start),
        "dtype": str(kv.keys.dtype).removeprefix("torch."),
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        save_file(tensors | {_IDS: ids}, str(temporary), header)
        info = BlobInfo(temporary.stat().st_size, _checksum(ids, sums))
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
        expected: the checksum it must have; None skips reading the tensors.

    Raises:
        CorruptBlobError: damaged, or not what it should be. The file is left as it is.
    """
    stored = open_blob(path, key, token_ids, codec, expected)
    if stored is None:
        return None
    if expected is not None and layer_sums(stored.tensors) != list(stored.sums):
        raise CorruptBlobError(_message(path, _DAMAGED))
    return stored.load()


def open_blob(
    path: Path, key: str, token_ids: Sequence[int] | None, codec: Codec, expected: str | None
) -> StoredKV | None:
    """A module's file, its layers unread; each is checked when it is. Otherwise as `read_blob`."""
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, RuntimeError) as error:
        if not path.exists():  # another process removed it between its header and its content
            return None
        raise CorruptBlobError(_message(path, f"it cannot be read ({error})")) from error
    if header.get("key") != key or header.get("codec") != codec.name:
        raise CorruptBlobError(_message(path, "it belongs to another module or codec"))
    try:
        ids = tensors.pop(_IDS)
        sums = tuple(header["layers"].split(","))
        dtype = getattr(torch, header["dtype"])
        held = tuple(ids.tolist())
        stored = StoredKV(held, int(header["start"]), tensors, sums, codec, dtype, path)
        codec.decode({n: t[:0] for n, t in tensors.items()}, held, stored.start, dtype)
    except (KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptBlobError(_message(path, f"its layout is wrong ({error})")) from error
    if expected is not None and _checksum(ids, sums) != expected:
        raise CorruptBlobError(_message(path, _DAMAGED))
    if token_ids is not None and held != tuple(token_ids):
        raise CorruptBlobError(_message(path, "it holds other tokens than its key stands for"))
    return stored


@dataclass(frozen=True)
class StoredKV:
    """A module in a file that is mapped, and read where it is touched. A `LayerSource`.

    Attributes:
        tensors: as the codec laid them down, layers first.
        sums: checksum of each layer.
        begin, end: which of the tokens; `end` None for all.
    """

    all_ids: tuple[int, ...]
    first: int
    tensors: Tensors
    sums: tuple[str, ...]
    codec: Codec
    dtype: torch.dtype
    path: Path
    begin: int = 0
    end: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.all_ids[self.begin : self.end]

    @property
    def start(self) -> int:
        """Position of the first token when the keys were computed."""
        return self.first + self.begin

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def slice(self, begin: int, end: int) -> StoredKV:
        """Tokens `begin` to `end` (exclusive) of these."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one layer, check it, decode it.

        Raises:
            CorruptBlobError: it is not what was written.
        """
        tensors = {name: tensor[index : index + 1] for name, tensor in self.tensors.items()}
        if layer_sums(tensors) != [self.sums[index]]:
            raise CorruptBlobError(_message(self.path, _DAMAGED))
        kv = self.codec.decode(tensors, self.all_ids, self.first, self.dtype)
        return kv.keys[0, :, self.begin : self.end], kv.values[0, :, self.begin : self.end]

    def load(self) -> ModuleKV:
        """All layers, unchecked."""
        kv = self.codec.decode(self.tensors, self.all_ids, self.first, self.dtype)
        return kv if self.end is None and not self.begin else kv.slice(self.begin, self.end or 0)


def layer_sums(tensors: Tensors) -> list[str]:
    """xxh3-64 of each layer's names and bytes: guards against damage, not against malice."""
    found = []
    for layer in range(min(len(tensor) for tensor in tensors.values())):
        state = xxhash.xxh3_64()
        for name in sorted(tensors):
            state.update(name.encode())
            state.update(tensors[name][layer].contiguous().view(torch.uint8).numpy().data)
        found.append(state.hexdigest())
    return found


def _checksum(ids: torch.Tensor, sums: Sequence[str]) -> str:
    """Of a whole file: its tokens, and its layers' checksums."""
    state = xxhash.xxh3_128(",".join(sums).encode())
    state.update(ids.contiguous().view(torch.uint8).numpy().data)
    return str(state.hexdigest())


def _message(path: Path, reason: str) -> str:
    return f"the KV file {path} is damaged or foreign: {reason}. It is dropped from the store."
