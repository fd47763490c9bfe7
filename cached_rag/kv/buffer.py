"""Keys and values in memory: a module's, and a whole prompt's, made of modules without more copies.

Prompt Cache's buffered concatenation (MLSys version, section 4): memory for the prompt and its
answer is taken once, and each module's keys are rotated straight into their slots. That may happen
layer by layer, while earlier layers are computed (CacheBlend, section 5.1): one thread reads,
checks and moves layer after layer; on CUDA its copies run on a stream of their own. Knows shapes,
position rules and placements; knows no model, no store and no method.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from cached_rag.errors import ConfigError
from cached_rag.kv.layers import KVShapes, Layered, each, holds, stacks_of
from cached_rag.kv.positions import PositionRule

# Capacities are rounded up to a multiple of so many slots, so that a spare buffer often fits.
_GROWTH, _SMALL_GROWTH = 1024, 256


@dataclass(frozen=True)
class Change:
    """What some tokens of a module do to `States`, whatever stands before them.

    Attributes:
        begin, end: these tokens of the module; the others, at its ends, are to be computed.
        packed: (num_bytes,) uint8, on the CPU, for `Composer.behind`.
    """

    begin: int
    end: int
    packed: torch.Tensor

    def within(self, begin: int, end: int) -> Change | None:
        """The same of a part of the module; None if the part has not all of the tokens."""
        has_all = begin <= self.begin and self.end <= end
        return replace(self, begin=self.begin - begin, end=self.end - begin) if has_all else None


class LayerSource(Protocol):
    """A module's KV that is taken layer by layer, and may be in memory or on disk."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""

    @property
    def start(self) -> int:
        """Position of the first token when the keys were computed."""

    @property
    def seq_len(self) -> int:
        """Number of tokens."""

    @property
    def change(self) -> Change | None:
        """What the tokens do to states; None if that is not known."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each (num_kv_heads, seq_len, dim).

        Raises:
            CorruptBlobError: it had to be read, and is damaged.
        """

    def slice(self, begin: int, end: int) -> LayerSource:
        """Tokens `begin` to `end` (exclusive)."""


@dataclass(frozen=True)
class ModuleKV:
    """Keys and values of consecutive tokens, in all layers.

    Attributes:
        token_ids: the tokens, `seq_len` of them.
        start: position of the first token when the keys were computed (>= 0).
        keys: (num_layers, num_kv_heads, seq_len, key_dim), rotated for the positions `start`,
            `start + 1`, ...
        values: (num_layers, num_kv_heads, seq_len, value_dim).
        change: what the tokens do to states, of layers that keep some; None if that is not known.

    Raises:
        ConfigError: the shapes do not agree.
    """

    token_ids: tuple[int, ...]
    start: int
    keys: Layered
    values: Layered
    change: Change | None = None

    def __post_init__(self) -> None:
        for name, side in (("keys", self.keys), ("values", self.values)):
            for tensor in stacks_of(side):
                if tensor.ndim != 4 or tensor.shape[2] != len(self.token_ids):
                    raise ConfigError(
                        f"{name} have shape {tuple(tensor.shape)}, expected "
                        f"(num_layers, num_kv_heads, {len(self.token_ids)}, dim)"
                    )
        if len(self.keys) != len(self.values):
            raise ConfigError("keys and values have different numbers of layers")
        if self.start < 0:
            raise ConfigError(f"start is a position and cannot be {self.start}")

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of the change."""
        changed = 0 if self.change is None else self.change.packed.nbytes
        return self.keys.nbytes + self.values.nbytes + changed

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, as views."""
        return self.keys[index], self.values[index]

    def slice(self, begin: int, end: int) -> ModuleKV:
        """Tokens `begin` to `end` (exclusive, within the module) as views, not copies."""
        return ModuleKV(
            self.token_ids[begin:end],
            self.start + begin,
            self.keys[:, :, begin:end],
            self.values[:, :, begin:end],
            self.change and self.change.within(begin, end),
        )


class States(Protocol):
    """What layers keep of a prompt's first tokens that has no length, as recurrent layers do."""

    @property
    def length(self) -> int:
        """How many tokens they have read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""

    def copy(self) -> States:
        """The same, which goes on by itself."""

    def packed(self) -> torch.Tensor:
        """(num_bytes,) uint8: all of it, for `Backend.unpacked`."""


class KVBuffer:
    """Keys and values of up to `capacity` tokens, one a slot.

    Slots are filled without gaps. The token in slot i is at position i, unless `lay_out` gives it
    another position.

    Attributes:
        keys: (num_layers, batch, num_kv_heads, capacity, key_dim).
        values: (num_layers, batch, num_kv_heads, capacity, value_dim).
        positions: (capacity,) int64 on the CPU, ascending; None if slot i is position i.
        states: what recurrent layers keep, where the last pass ended; None if there is none.
        snapshots: copies of them, by the number of tokens that they have read.
    """

    def __init__(self, keys: Layered, values: Layered) -> None:
        self.keys = keys
        self.values = values
        self.positions: torch.Tensor | None = None
        self.states: States | None = None
        self.snapshots: dict[int, States] = {}

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
        return cls(*shapes.empty(batch, capacity))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return stacks_of(self.keys)[0].shape[3]

    def new(self, capacity: int) -> KVBuffer:
        """An uninitialised buffer of the same sizes, but for so many tokens."""

        def room(stack: torch.Tensor) -> torch.Tensor:
            return stack.new_empty(*stack.shape[:3], capacity, stack.shape[4])

        return KVBuffer(each(self.keys, room), each(self.values, room))

    @property
    def batch(self) -> int:
        """How many prompts it is for."""
        return stacks_of(self.keys)[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of states."""
        held = {id(one): one.nbytes for one in (self.states, *self.snapshots.values()) if one}
        return self.keys.nbytes + self.values.nbytes + sum(held.values())

    def place(self, module: LayerSource, slot: int, rule: PositionRule) -> None:
        """Copy a module to the slots from `slot` on, its keys rotated to their positions.

        Raises:
            RelocationError: it has to be moved, and the model's keys cannot be.
            CorruptBlobError: it had to be read, and is damaged.
        """
        if not isinstance(module, ModuleKV):
            for layer in range(len(self.keys)):
                self.place_layer(module, slot, rule, layer)
            return
        delta, end = self.position(slot) - module.start, slot + module.seq_len
        keys = module.keys.to(self.keys.device, non_blocking=True)
        for row in range(self.batch):
            at = (slice(None), row, slice(None), slice(slot, end))
            rule.relocate(keys, delta, self.keys[at])
            rule.relocate(module.values, delta, self.values[at], of="values")

    def place_layer(self, source: LayerSource, slot: int, rule: PositionRule, layer: int) -> None:
        """As `place`, for one layer; of one that keeps nothing, nothing."""
        if not holds(self.keys, layer):
            return
        keys, values = source.layer(layer)
        delta, end = self.position(slot) - source.start, slot + source.seq_len
        keys = keys[None].to(self.keys.device, non_blocking=True)
        for row in range(self.batch):
            at = (slice(row, row + 1), slice(None), slice(slot, end))
            rule.relocate(keys, delta, self.keys[layer][at], layer)
            rule.relocate(values[None], delta, self.values[layer][at], layer, of="values")

    def write(
        self, layer: int, rows: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put computed (batch, num_kv_heads, num_rows, dim) keys and values into slots `rows`."""
        if isinstance(rows, slice):
            self.keys[layer][:, :, rows] = keys
            self.values[layer][:, :, rows] = values
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


class Placed(Protocol):
    """Cached KV, and where in the buffer it goes."""

    @property
    def begin(self) -> int:
        """Slot of its first token."""

    @property
    def kv(self) -> LayerSource:
        """Its keys and values."""


class LayerLoader:
    """Fills a buffer layer by layer; `wait` has to be called before a layer is used.

    Attributes:
        failed: the placement that could not be loaded; None if there is none.
    """

    def __init__(self, buffer: KVBuffer, placements: Sequence[Placed], rule: PositionRule) -> None:
        self._buffer, self._placements, self._rule = buffer, tuple(placements), rule
        # Of each layer, on CUDA with the event of its last copy.
        self._ready = [Future[Any]() for _ in range(len(buffer.keys))]
        self.failed: Placed | None = None
        self._is_cancelled = False
        self._device = buffer.keys.device
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Kernels of the request that had the buffer before may still read it.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Return when a layer is in the buffer; on CUDA, for the buffer's current stream.

        Raises:
            CorruptBlobError: a module's file is damaged.
            StoreError: a module's file cannot be read now.
        """
        copied = self._ready[layer].result()
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def finish(self) -> None:
        """Stop loading, complete or not; nothing writes into the buffer afterwards."""
        self._is_cancelled = True
        self._thread.join()
        if self._stream is not None:  # whose copies may go on
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self) -> None:
        try:
            for layer, ready in enumerate(self._ready):
                if self._is_cancelled:
                    ready.cancel()
                else:
                    ready.set_result(self._load(layer))
        except BaseException as error:  # raised again by `wait`
            for ready in self._ready[layer:]:
                ready.set_exception(error)

    @torch.inference_mode()
    def _load(self, layer: int) -> Any:
        with torch.cuda.stream(self._stream):  # does nothing if there is none
            for place in self._placements:
                self.failed = place
                self._buffer.place_layer(place.kv, place.begin, self._rule, layer)
            self.failed = None
            if self._stream is None:
                return None
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            return copied


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
            if capacity <= spare.capacity <= 2 * rounded(capacity):
                # Another one of the same memory: who knows the former knows what was in it.
                return KVBuffer(spare.keys, spare.values)
        return KVBuffer.like(self._shapes, rounded(capacity))

    def size(self, capacity: int) -> int:
        """The capacity that a buffer of at least so many slots would have now."""
        spare = max((one.capacity for one in list(self._spare)), default=0)
        return spare if capacity <= spare <= 2 * rounded(capacity) else rounded(capacity)

    def give(self, buffer: KVBuffer) -> None:
        """Take a buffer back that nobody reads any more."""
        self._spare[:] = [buffer]


def rounded(capacity: int) -> int:
    """How many slots memory for at least so many has."""
    step = _SMALL_GROWTH if capacity < _GROWTH else _GROWTH
    return -(-capacity // step) * step
