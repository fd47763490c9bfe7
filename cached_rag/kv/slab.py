"""Buffers for several prompts in one tensor, so that one kernel call serves them all.

Rows of one slab have the same room; how much of it is used differs, and a mask says so. Knows
shapes; knows no prompt.
"""

from __future__ import annotations

import torch

from cached_rag.kv.buffer import KVBuffer, KVShapes

# Longer rows gain nothing: reading their keys takes longer than calling a kernel.
LONGEST = 1024
_STEP = 256
# On a CPU memory that nobody writes to takes no room.
_ROWS = {"cpu": 16}
_FEW_ROWS = 4


class Slab:
    """Keys and values of several rows.

    Attributes:
        keys: (num_layers, num_rows, num_kv_heads, capacity, head_dim).
        values: (num_layers, num_rows, num_kv_heads, capacity, value_dim).
    """

    def __init__(self, shapes: KVShapes, rows: int, capacity: int) -> None:
        whole = KVBuffer.like(shapes, capacity, rows)
        self.keys, self.values = whole.keys, whole.values
        self.free = list(range(rows))[::-1]
        self._fresh = set(self.free)

    @property
    def num_rows(self) -> int:
        """Rows, used or not."""
        return self.keys.shape[1]

    def take(self) -> SlabRow:
        """A free row; there must be one."""
        row = self.free[-1]
        found = SlabRow(self, row)
        if row in self._fresh:  # what is masked must be finite all the same
            self._fresh.remove(row)
            found.keys.zero_()
            found.values.zero_()
        self.free.pop()
        return found


class SlabRow(KVBuffer):
    """One row of a slab."""

    def __init__(self, slab: Slab, row: int) -> None:
        super().__init__(slab.keys[:, row : row + 1], slab.values[:, row : row + 1])
        self.slab, self.row = slab, row


class Slabs:
    """Slabs of one model, by capacity. Used by one thread at a time."""

    def __init__(self, shapes: KVShapes) -> None:
        self._shapes = shapes
        self._slabs: dict[int, list[Slab]] = {}

    def take(self, capacity: int) -> KVBuffer:
        """A buffer of at least so many slots: a slab's row, if it is not too long for one."""
        if capacity > LONGEST:
            return KVBuffer.like(self._shapes, capacity)
        rounded = -(-capacity // _STEP) * _STEP
        held = self._slabs.setdefault(rounded, [])
        slab = next((slab for slab in held if slab.free), None)
        if slab is None:
            rows = _ROWS.get(self._shapes.device.type, _FEW_ROWS)
            slab = Slab(self._shapes, rows, rounded)
            held.append(slab)
        return slab.take()

    def give(self, buffer: KVBuffer) -> None:
        """Take a row back that nobody reads any more; other buffers are the collector's."""
        if isinstance(buffer, SlabRow):
            buffer.slab.free.append(buffer.row)

    def drop_idle(self) -> None:
        """Free the memory of slabs that nobody uses."""
        for capacity, held in self._slabs.items():
            self._slabs[capacity] = [slab for slab in held if len(slab.free) < slab.num_rows]


def mask_of(
    spans: dict[int, tuple[int, int]], first: int, last: int, like: torch.Tensor
) -> torch.Tensor:
    """(last - first + 1, 1, 1, length) additive mask over rows' first `length` slots.

    Args:
        spans: by row, the slots it sees; rows that are not in it see nothing.
        like: of whose dtype and device.
    """
    length = max(end for _, end in spans.values())
    mask = torch.full((last - first + 1, 1, 1, length), -torch.inf)
    for row, (begin, end) in spans.items():
        mask[row - first, ..., begin:end] = 0
    return mask.to(like.device, like.dtype)
