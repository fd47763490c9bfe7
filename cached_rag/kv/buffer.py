"""Memory for the KV of a whole prompt, into which modules are placed without further copies.

Prompt Cache's buffered concatenation (MLSys version, section 4): memory for the prompt and its
answer is taken once, and each module's keys are rotated straight into their slots. Buffers of
several prompts lie in one tensor (a slab), so that one kernel call reads all of them: its rows have
the same capacity, and as they use different parts of it, a mask hides the rest. Knows shapes and
position rules; knows no model and no prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from cached_rag.kv.module import LayerSource, ModuleKV
from cached_rag.kv.positions import PositionRule

# Capacities are rounded up to a multiple of so many slots, so that a spare buffer often fits.
_GROWTH, _SMALL_GROWTH = 1024, 256
# Longer buffers gain nothing by it: to read their keys takes longer than to call a kernel.
LONGEST_SLAB = 1024
# Rows of a slab: on a CPU those that were never used take no memory.
_ROWS = {"cpu": 16}
_FEW_ROWS = 4


@dataclass(frozen=True)
class KVShapes:
    """Sizes, dtype and device of a model's keys (head_dim) and values (value_dim)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        width = self.num_kv_heads * (self.head_dim + self.value_dim)
        return self.num_layers * width * self.dtype.itemsize

    def fits(self, kv: ModuleKV) -> bool:
        """Whether keys and values have this dtype and these sizes, for any number of tokens."""
        heads, count = (self.num_layers, self.num_kv_heads), kv.seq_len
        keys, values = (*heads, count, self.head_dim), (*heads, count, self.value_dim)
        is_typed = kv.keys.dtype == kv.values.dtype == self.dtype
        return is_typed and kv.keys.shape == keys and kv.values.shape == values


class KVBuffer:
    """Keys and values of up to `capacity` tokens, one a slot.

    Slots are filled without gaps. The token in slot i is at position i, unless `lay_out` gives it
    another position.

    Attributes:
        keys: (num_layers, batch, num_kv_heads, capacity, head_dim).
        values: (num_layers, batch, num_kv_heads, capacity, value_dim).
        positions: (capacity,) int64 on the CPU, ascending; None if slot i is position i.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.positions: torch.Tensor | None = None

    def lay_out(self, positions: Sequence[int] | None) -> KVBuffer:
        """Set the positions of the first slots; the other slots follow without gaps.

        None makes slot i position i again.
        """
        if positions is None:
            self.positions = None
            return self
        given = torch.tensor(positions)
        later = torch.arange(self.capacity - len(given)) + given[-1] + 1
        self.positions = torch.cat([given, later])
        return self

    def position(self, slot: int) -> int:
        """The position of the token in a slot."""
        return slot if self.positions is None else int(self.positions[slot])

    @classmethod
    def like(cls, shapes: KVShapes, capacity: int, batch: int = 1) -> KVBuffer:
        """A buffer with uninitialised content."""

        def room(dim: int) -> torch.Tensor:
            size = (shapes.num_layers, batch, shapes.num_kv_heads, capacity, dim)
            return torch.empty(size, dtype=shapes.dtype, device=shapes.device)

        return cls(room(shapes.head_dim), room(shapes.value_dim))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def place(self, module: LayerSource, slot: int, rule: PositionRule) -> None:
        """Copy a module to the slots from `slot` on, its keys rotated to their positions.

        Raises:
            RelocationError: it has to be moved, and the model's keys cannot be.
            CorruptBlobError: it had to be read, and is damaged.
        """
        if isinstance(module, ModuleKV):
            self._put(module, slot, rule, 0, module.keys, module.values)
            return
        for layer in range(len(self.keys)):
            self.place_layer(module, slot, rule, layer)

    def place_layer(self, source: LayerSource, slot: int, rule: PositionRule, layer: int) -> None:
        """As `place`, for one layer."""
        keys, values = source.layer(layer)
        self._put(source, slot, rule, layer, keys[None], values[None])

    def _put(
        self,
        source: LayerSource,
        slot: int,
        rule: PositionRule,
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Copy a source's (layers, num_kv_heads, seq_len, dim) to the layers from `first` on."""
        last, end = first + len(keys), slot + source.seq_len
        delta = self.position(slot) - source.start
        keys = keys.to(self.keys.device, non_blocking=True)
        for row in range(self.keys.shape[1]):
            rule.relocate(keys, delta, self.keys[first:last, row, :, slot:end], first)
            self.values[first:last, row, :, slot:end].copy_(values, non_blocking=True)

    def write(
        self, layer: int, rows: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put computed (batch, num_kv_heads, num_rows, dim) keys and values into slots `rows`."""
        if isinstance(rows, slice):
            self.keys[layer, :, :, rows] = keys
            self.values[layer, :, :, rows] = values
        else:
            self.keys[layer].index_copy_(2, rows, keys)
            self.values[layer].index_copy_(2, rows, values)

    def read(self, begin: int, end: int, token_ids: tuple[int, ...], row: int = 0) -> ModuleKV:
        """A copy of slots `begin` to `end` (exclusive) as a module that starts at their position.

        Args:
            row: which prompt of the batch.
        """
        return ModuleKV(
            token_ids,
            self.position(begin),
            self.keys[:, row, :, begin:end].clone(memory_format=torch.contiguous_format),
            self.values[:, row, :, begin:end].clone(memory_format=torch.contiguous_format),
        )


class Workspace:
    """Lends buffers, and keeps the last one that came back: memory used before has no page faults.

    For all threads.
    """

    def __init__(self, shapes: KVShapes) -> None:
        self._shapes = shapes
        self._spare: list[KVBuffer] = []  # at most one; a list, because its pop is atomic

    def take(self, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` slots, with whatever content."""
        with suppress(IndexError):
            spare = self._spare.pop()
            if capacity <= spare.capacity <= 2 * _rounded(capacity):
                return spare.lay_out(None)
        return KVBuffer.like(self._shapes, _rounded(capacity))

    def size(self, capacity: int) -> int:
        """The capacity that a buffer of at least so many slots would have now."""
        spare = max((one.capacity for one in list(self._spare)), default=0)
        return spare if capacity <= spare <= 2 * _rounded(capacity) else _rounded(capacity)

    def give(self, buffer: KVBuffer) -> None:
        """Take a buffer back that nobody reads any more."""
        self._spare[:] = [buffer]


class Slab:
    """Keys and values of `num_rows` rows, each the buffer of a prompt.

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
        """A buffer of at least `capacity` slots: a slab's row, unless that would be too long."""
        if capacity > LONGEST_SLAB:
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
        if capacity > LONGEST_SLAB:
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


def _rounded(capacity: int) -> int:
    step = _SMALL_GROWTH if capacity < _GROWTH else _GROWTH
    return -(-capacity // step) * step
