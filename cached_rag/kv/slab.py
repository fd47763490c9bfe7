"""Buffers of several prompts in one tensor (a slab), so that one kernel call reads all of them.

The rows of a slab have the same capacity. They use different parts of it, so a mask hides the
rest. Knows shapes; knows no prompt.
"""

from __future__ import annotations

import torch

from cached_rag.kv.buffer import KVBuffer, KVShapes

# Longer buffers gain nothing by it: to read their keys takes longer than to call a kernel.
LONGEST = 1024
_STEP = 256
# Rows of a slab. On a CPU those that were never used take no memory.
_ROWS = {"cpu": 16}
_FEW_ROWS = 4


class Slab:
    """Keys and values of `num_rows` rows.

    Attributes:
        free: numbers of the rows that nobody uses.
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
        """Number of rows, used or not."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: on a CPU only those of rows that were ever used."""
        used = sum(map(self.is_held, range(self.num_rows)))
        return (self.keys.nbytes + self.values.nbytes) // self.num_rows * used

    def is_held(self, row: int) -> bool:
        """Whether a row takes memory: on a CPU only if it was ever used."""
        return row not in self._fresh or self.keys.device.type != "cpu"

    def take(self) -> SlabRow:
        """A free row; there has to be one."""
        row = self.free[-1]
        found = SlabRow(self, row)
        if row in self._fresh:  # masked slots are read, too, so they must not hold NaN
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
    """All slabs of one model, by capacity. For one thread at a time."""

    def __init__(self, shapes: KVShapes) -> None:
        self._shapes = shapes
        self._slabs: dict[int, list[Slab]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, rows that nobody uses now among them."""
        return sum(slab.nbytes for held in self._slabs.values() for slab in held)

    def take(self, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` slots: a slab's row, unless it is longer than LONGEST."""
        if capacity > LONGEST:
            return KVBuffer.like(self._shapes, capacity)
        rounded = _rounded(capacity)
        held = self._slabs.setdefault(rounded, [])
        slab = next((slab for slab in held if slab.free), None)
        if slab is None:
            rows = _ROWS.get(self._shapes.device.type, _FEW_ROWS)
            slab = Slab(self._shapes, rows, rounded)
            held.append(slab)
        return slab.take()

    def cost(self, capacity: int) -> int:
        """Bytes that `take` would add to what there is."""
        if capacity > LONGEST:
            return capacity * self._shapes.bytes_per_token
        rounded, is_cpu = _rounded(capacity), self._shapes.device.type == "cpu"
        for slab in self._slabs.get(rounded, ()):
            if slab.free:
                return 0 if slab.is_held(slab.free[-1]) else rounded * self._shapes.bytes_per_token
        return rounded * self._shapes.bytes_per_token * (1 if is_cpu else _FEW_ROWS)

    def give(self, buffer: KVBuffer) -> None:
        """Take a slab's row back that nobody reads any more; other buffers are just dropped."""
        if isinstance(buffer, SlabRow):
            buffer.slab.free.append(buffer.row)

    def drop_idle(self) -> None:
        """Free the memory of slabs of which no row is used."""
        for capacity, held in self._slabs.items():
            self._slabs[capacity] = [slab for slab in held if len(slab.free) < slab.num_rows]


def _rounded(capacity: int) -> int:
    return -(-capacity // _STEP) * _STEP


def mask_of(
    spans: dict[int, tuple[int, int]], first: int, last: int, like: torch.Tensor
) -> torch.Tensor:
    """A mask to add to attention scores: 0 where a row sees a slot, -inf elsewhere.

    Args:
        spans: for each row, the slots that it sees (begin, end); other rows see none.
        first, last: the first and the last row of the mask.
        like: a tensor that has the dtype and device wanted.

    Returns:
        (last - first + 1, 1, 1, length), where length is the largest end.
    """
    length = max(end for _, end in spans.values())
    mask = torch.full((last - first + 1, 1, 1, length), -torch.inf)
    for row, (begin, end) in spans.items():
        mask[row - first, ..., begin:end] = 0
    return mask.to(like.device, like.dtype)
