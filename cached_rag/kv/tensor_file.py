"""A safetensors file, read piece by piece into the process's own memory.

It is not mapped, as the safetensors library would do: if another process shortens a mapped file,
whoever reads it is killed (SIGBUS). A read just comes back short, which is damage like any other.
Knows the format; knows no module.
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import torch

from cached_rag.kv.files import open_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_LENGTH_BYTES = 8
_HEADER_LIMIT = 1 << 20
# More tensors, axes or elements than any codec writes: arithmetic on them would take its time.
_MOST_TENSORS, _MOST_AXES, _LARGEST = 16, 8, 1 << 48


@dataclass(frozen=True)
class TensorLayout:
    """A tensor in a file, and the byte at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """An open file, which can still be read when it was deleted since; or bytes like it.

    Attributes:
        header: its metadata.
        layouts: by name, what its tensors are and where.
    """

    def __init__(self, file: BufferedIOBase, size: int) -> None:
        """Read the header. The file is closed when this object is gone.

        Args:
            file: open for reading.
            size: number of its bytes.

        Raises:
            OSError: it cannot be read, which says nothing about what is in it.
            ValueError: it is no safetensors file, or one that is cut short.
        """
        self._file = file
        weakref.finalize(self, file.close).atexit = False
        self._lock = threading.Lock()
        length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
        if length > _HEADER_LIMIT:
            raise ValueError("its header is no header")
        begin = _LENGTH_BYTES + length
        try:
            found = dict(json.loads(self._bytes(_LENGTH_BYTES, length)))
            if len(found) > _MOST_TENSORS + 1:
                raise ValueError("it has too many tensors")
            self.header = {str(k): str(v) for k, v in dict(found.pop("__metadata__", {})).items()}
            self.layouts = {
                str(name): _layout(entry, begin, size - begin) for name, entry in found.items()
            }
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"its header is wrong ({error!r})") from error

    @classmethod
    def at(cls, path: Path) -> TensorFile:
        """Open the file at a path; errors as above."""
        file = open_file(path)
        return cls(file, os.fstat(file.fileno()).st_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        sizes = [math.prod(one.shape) * one.dtype.itemsize for one in self.layouts.values()]
        return sum(sizes)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """A copy of a tensor, or of its part `begin` to `end` (exclusive) along the first axis.

        Raises:
            OSError: it cannot be read, which says nothing about what is in it.
            KeyError, ValueError: it is not there, or the file has become shorter.
        """
        layout = self.layouts[name]
        rows = (layout.shape[0] if end is None else end) - begin
        tensor = torch.empty((rows, *layout.shape[1:]), dtype=layout.dtype)
        row_bytes = math.prod(layout.shape[1:]) * layout.dtype.itemsize
        self._fill(tensor.view(torch.uint8).numpy().data, layout.begin + begin * row_bytes)
        return tensor

    def _bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, memory: memoryview, offset: int) -> None:
        with self._lock:
            self._file.seek(offset)
            count = self._file.readinto(memory)
        if count < memory.nbytes:
            raise ValueError("it is cut short")


def _layout(entry: dict[str, object], offset: int, room: int) -> TensorLayout:
    """Where a tensor is, if there is room for all of it."""
    dtype = _DTYPES[str(entry["dtype"])]
    shape, (begin, end) = _numbers(entry["shape"]), _numbers(entry["data_offsets"])
    nbytes = math.prod(shape) * dtype.itemsize
    if not shape or end - begin != nbytes or end > room:
        raise ValueError("its header and its length do not agree")
    return TensorLayout(dtype, shape, offset + begin)


def _numbers(entry: object) -> tuple[int, ...]:
    if not isinstance(entry, list) or len(entry) > _MOST_AXES:
        raise TypeError("it has no sizes")
    if not all(type(n) is int and 0 <= n <= _LARGEST for n in entry):
        raise TypeError(f"{entry!r:.40} are no sizes")
    return tuple(entry)
