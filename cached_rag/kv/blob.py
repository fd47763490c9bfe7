"""One module as one safetensors file, written in a codec and checked when it is read.

Every layer has a checksum of its own, so that it can be used before the next one is read. These
checksums stand in the file's header, and the index keeps a checksum of the header and the token
ids. With a secret, all of these are signatures. Knows what is in a file; knows no index and no
eviction.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv.buffer import Change, ModuleKV
from cached_rag.kv.codecs import Codec, KeysAndValues, Tensors
from cached_rag.kv.layers import Ragged, stacks_of
from cached_rag.kv.tensor_file import TensorFile, TensorLayout

_IDS, _CHANGE = "token_ids", "change"
_DAMAGED = "its content does not match its checksum"


def write_blob(
    path: Path, key: str, kv: ModuleKV, codec: Codec, secret: bytes = b""
) -> tuple[int, str]:
    """Write a module to a new file that only its owner may read.

    Args:
        secret: signs it; empty for checksums only.

    Returns:
        What the index keeps of it: its size in bytes, and the checksum of header and token ids.

    Raises:
        OSError, SafetensorError: it could not be written.
    """
    tensors, header = contents(key, kv, codec, secret)
    save_file(tensors, str(path), header)
    path.chmod(0o600)
    return path.stat().st_size, checksum(header, tensors, tensors[_IDS], secret)


def contents(
    key: str, kv: ModuleKV, codec: Codec, secret: bytes = b""
) -> tuple[Tensors, dict[str, str]]:
    """What a module's file has: its tensors, and its header with a checksum of each layer."""
    tensors: Tensors = {}
    sums: list[str] = []
    for number, stacks in enumerate(zip(stacks_of(kv.keys), stacks_of(kv.values), strict=True)):
        held = codec.encode(*stacks)
        sums += layer_sums(held, secret)
        suffix = f".{number}" if number else ""
        tensors |= {f"{name}{suffix}": tensor for name, tensor in held.items()}
    header = {
        "layers": ",".join(sums),
        "key": key,
        "codec": codec.name,
        "start": str(kv.start),
        "dtype": str(kv.keys.dtype).removeprefix("torch."),
    }
    if isinstance(kv.keys, Ragged):
        header["places"] = json.dumps(kv.keys.places)
    if (change := kv.change) is not None:
        tensors[_CHANGE] = change.packed[None]
        (total,) = layer_sums({_CHANGE: tensors[_CHANGE]}, secret)
        header[_CHANGE] = f"{change.begin},{change.end},{total}"
    return tensors | {_IDS: torch.tensor(kv.token_ids, dtype=torch.int32)}, header


def opened(
    file: TensorFile,
    name: str,
    key: str,
    token_ids: Sequence[int] | None,
    codec: Codec,
    expected: str | None,
    secret: bytes = b"",
) -> StoredKV:
    """A module in a file that is open. Its layers are checked when they are read.

    Args:
        name: how messages call it.
        token_ids: the tokens whose KV it must hold; None for any.
        expected: the checksum that the index has for it; None if all of it was checked already.
        secret: it has to be signed with this; empty for checksums only.

    Raises:
        CorruptBlobError: damaged, or not what it should be.
        StoreError: it cannot be read now; nothing is known about its content.
    """
    with judged(name):
        header = file.header
        if header.get("key") != key or header.get("codec") != codec.name:
            raise CorruptBlobError(_message(name, "it belongs to another module or codec"))
        ids = file.read(_IDS)
        if expected is not None and checksum(header, file.layouts, ids, secret) != expected:
            raise CorruptBlobError(_message(name, _DAMAGED))
        held = tuple(ids.tolist())
        if token_ids is not None and held != tuple(token_ids):
            raise CorruptBlobError(_message(name, "it holds other tokens than its key stands for"))
        sums = tuple(header["layers"].split(","))
        dtype = getattr(torch, header["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its header names no dtype")
        places = _places(header, len(sums))
        start, end = int(header["start"]), len(held)
        return StoredKV(held, start, file, sums, places, codec, dtype, name, secret, 0, end)


@dataclass(frozen=True)
class StoredKV:
    """A module in an open file, of which a layer is read when it is asked for. A `LayerSource`.

    Attributes:
        all_ids: the tokens of the whole file.
        first: position of the first of these when the keys were computed.
        sums: the checksum of each layer that keeps anything, stack by stack.
        places: see `Ragged`; of layers that are alike all are in one stack.
        dtype: what keys and values are decoded to.
        name: how messages call the file.
        secret: what the checksums are signed with; empty if they are not.
        begin, end: the part of the tokens that this is.
    """

    all_ids: tuple[int, ...]
    first: int
    file: TensorFile
    sums: tuple[str, ...]
    places: tuple[tuple[int, int] | None, ...]
    codec: Codec
    dtype: torch.dtype
    name: str
    secret: bytes = field(repr=False)
    begin: int
    end: int

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

    @property
    def change(self) -> Change | None:
        """What the tokens do to states, read and checked; errors as in `layer`."""
        whole = self._whole_change()
        return whole and whole.within(self.begin, self.end)

    def _whole_change(self) -> Change | None:
        if _CHANGE not in self.file.header:
            return None
        with judged(self.name):
            begin, end, total = self.file.header[_CHANGE].split(",")
            packed = self.file.read(_CHANGE)
            if layer_sums({_CHANGE: packed}, self.secret) != [total]:
                raise CorruptBlobError(_message(self.name, _DAMAGED))
            return Change(int(begin), int(end), packed[0])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one layer, check it, decode it.

        Raises:
            CorruptBlobError: it is not what was written.
            StoreError: it cannot be read now.
        """
        place = self.places[index]
        if place is None:
            raise IndexError(f"layer {index} keeps nothing of its own")
        keys, values = self._read(place[0], place[1], place[1] + 1)
        return keys[0, :, self.begin : self.end], values[0, :, self.begin : self.end]

    def load(self) -> ModuleKV:
        """Read all layers; errors as in `layer`."""
        sides = zip(*(self._read(n, 0, count) for n, count in enumerate(self._counts)), strict=True)
        is_even = len(self._counts) == 1 and None not in self.places
        keys, values = (side[0] if is_even else Ragged(side, self.places) for side in sides)
        whole = ModuleKV(self.all_ids, self.first, keys, values, self._whole_change())
        return whole.slice(self.begin, self.end)

    @property
    def _counts(self) -> list[int]:
        """How many layers each stack has."""
        found = Counter(place[0] for place in self.places if place)
        return [found[number] for number in range(len(found))]

    def _read(self, stack: int, begin: int, end: int) -> KeysAndValues:
        """Layers `begin` to `end` (exclusive) of a stack."""
        with judged(self.name):
            tensors = {}
            for name in self.file.layouts:
                plain, _, number = name.partition(".")
                if name not in (_IDS, _CHANGE) and int(number or 0) == stack:
                    tensors[plain] = self.file.read(name, begin, end)
            first = sum(self._counts[:stack])
            if layer_sums(tensors, self.secret) != list(self.sums[first + begin : first + end]):
                raise CorruptBlobError(_message(self.name, _DAMAGED))
            return self.codec.decode(tensors, self.dtype)


def _places(header: Mapping[str, str], count: int) -> tuple[tuple[int, int] | None, ...]:
    """Where each layer is, as the header says; KeyError or ValueError if it says it wrongly."""
    if "places" not in header:
        return tuple((0, layer) for layer in range(count))
    try:
        given = json.loads(header["places"])
        found = tuple(None if at is None else (int(at[0]), int(at[1])) for at in given)
    except (TypeError, IndexError) as error:
        raise ValueError(f"its header places layers wrongly ({error})") from error
    held = sorted(at for at in found if at is not None)
    sizes = Counter(at[0] for at in held)
    if held != [(n, i) for n in range(len(sizes)) for i in range(sizes[n])] or len(held) != count:
        raise ValueError("its header places layers wrongly")
    return found


def layer_sums(tensors: Tensors, secret: bytes = b"") -> list[str]:
    """Of each layer's tensors, names and bytes: xxh3-64 against damage, BLAKE2b against malice."""
    found = []
    for layer in range(min(len(tensor) for tensor in tensors.values())):
        state = _signer(secret) if secret else xxhash.xxh3_64()
        for name in sorted(tensors):
            state.update(name.encode())
            if (data := tensors[name][layer]).numel():  # of some layers keys have no width
                state.update(data.contiguous().view(torch.uint8).numpy().data)
        found.append(state.hexdigest())
    return found


def checksum(
    header: Mapping[str, str],
    parts: Mapping[str, torch.Tensor | TensorLayout],
    ids: torch.Tensor,
    secret: bytes = b"",
) -> str:
    """Of a file's header (layers' checksums included), tensor shapes and token ids."""
    shapes = [(name, str(one.dtype), tuple(one.shape)) for name, one in sorted(parts.items())]
    state = hasher(secret)
    state.update(json.dumps([sorted(header.items()), shapes]).encode())
    state.update(ids.contiguous().view(torch.uint8).numpy().data)
    return str(state.hexdigest())


def signer_name(secret: bytes) -> str:
    """Tells those who have a secret from others; empty if there is none."""
    return _signer(secret).hexdigest() if secret else ""


def hasher(secret: bytes) -> hashlib.blake2b | xxhash.xxh3_128:
    """Begins a checksum (XXH3), or a signature (BLAKE2b) with a secret; of 16 bytes both."""
    return _signer(secret) if secret else xxhash.xxh3_128()


def _signer(secret: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, key=secret)


@contextmanager
def judged(name: str) -> Iterator[None]:
    """Turns errors that prove damage into CorruptBlobError, others of reading into StoreError."""
    try:
        yield
    except (KeyError, ValueError, AttributeError) as error:
        raise CorruptBlobError(_message(name, f"it cannot be read ({error})")) from error
    except (OSError, MemoryError, RuntimeError) as error:
        raise StoreError(f"the KV file {name} cannot be read now ({error}). It is kept.") from error


def _message(name: str, reason: str) -> str:
    return f"the KV file {name} is damaged or foreign: {reason}. It is dropped from the store."
