"""Which KV leaves where room is short: S3-FIFO, as three queues in memory.

New entries enter a small queue, a tenth of the room. One that is used there, if only once, moves to
the main queue; one that is not leaves, and its key is remembered for a while: if it comes back, it
enters the main queue. There an entry goes round once for each use, up to three, before it leaves.
So texts that are ingested and never asked for do not push out those that are asked for every day,
and what was popular last year leaves all the same (docs/scale.md has hit rates). An entry's cost to
compute again grows with its bytes, in one model, so that neither decides.

What is pinned is in no queue. What has a time to live goes when it is over, whatever its queue.

From S3-FIFO (Yang et al., SOSP 2023, https://doi.org/10.1145/3600006.3613147), section 4. Files on
disk have the same queues in their table (`entries.py`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from cached_rag.errors import ConfigError, StoreFullError

# The small queue's share of the room, and the most uses that count.
SMALL_SHARE, MOST_USES = 0.1, 3
# What pins may take of the room: the rest is for everybody.
PINNED_SHARE = 0.5
V = TypeVar("V")


def too_many_pins(held: int, max_bytes: int) -> StoreFullError:
    """The error of pins that take more than their share.

    Args:
        held: bytes that they would take.
    """
    return StoreFullError(
        f"pinned KV may take {PINNED_SHARE * max_bytes:.0f} of the store's {max_bytes} bytes, and "
        f"would take {held}; unpin some, or raise the store's bound"
    )


def no_room(nbytes: int, room: int) -> StoreFullError:
    """The error of KV for which pins leave too little room."""
    return StoreFullError(
        f"a module of {nbytes} bytes does not fit into the {room} that pinned KV leaves; unpin "
        "some, or raise the store's bound"
    )


def until_when(ttl_seconds: float | None) -> float | None:
    """When so many seconds will be over, in seconds since 1970.

    Raises:
        ConfigError: the time is not positive.
    """
    if ttl_seconds is not None and not ttl_seconds > 0:
        raise ConfigError(f"a time to live is more than 0 seconds, not {ttl_seconds}")
    return None if ttl_seconds is None else time.time() + ttl_seconds


class Evicting(Generic[V]):
    """A mapping of at most `max_bytes` bytes. Not safe for several threads."""

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        """Make it empty.

        Args:
            size: bytes of an entry.
        """
        self.max_bytes, self._size = max_bytes, size
        self.nbytes = self._small_bytes = self._pinned_bytes = 0
        self._small: OrderedDict[str, V] = OrderedDict()
        self._main: OrderedDict[str, V] = OrderedDict()
        self._pinned: dict[str, V] = {}
        self._uses: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: str) -> bool:
        return key in self._uses and not self._is_over(key)

    def values(self) -> Iterator[V]:
        """All entries."""
        for queue in (self._small, self._main, self._pinned):
            yield from queue.values()

    def get(self, key: str) -> V | None:
        """An entry; None if it is not there."""
        return self._queue(key)[key] if key in self else None

    def touch(self, key: str) -> None:
        """Count a use of an entry, if it is there."""
        if key in self._uses:
            self._uses[key] = min(MOST_USES, self._uses[key] + 1)

    def put(self, key: str, value: V) -> None:
        """Add an entry, or replace it; others leave for it.

        Raises:
            StoreFullError: it is larger than what pins leave.
        """
        for name in [name for name in self._until if self._is_over(name)]:
            self.pop(name)
        old = self._size(self._pinned[key]) if key in self._pinned else 0
        room = self.max_bytes - self._pinned_bytes + old
        if self._size(value) > room:
            raise no_room(self._size(value), room)
        queue: dict[str, V] = self._main if key in self._gone else self._small
        uses = self._uses.get(key, 0)
        if key in self._uses:
            queue = self._queue(key)
            self._taken(key)
        self._gone.pop(key, None)
        while self.nbytes + self._size(value) > self.max_bytes:
            self._make_room()
        self._add(queue, key, value, uses)

    def hold(self, keys: Iterable[str], *, pinned: bool | None, until: float | None) -> int:
        """See `KVStore.hold`."""
        held = [key for key in dict.fromkeys(keys) if key in self]
        moved = [k for k in held if pinned is not None and pinned != (k in self._pinned)]
        kept = {key for key in self._pinned if key in self}
        pins = sum(self._size(self._queue(key)[key]) for key in kept.union(moved))
        if pinned and moved and pins > PINNED_SHARE * self.max_bytes:
            raise too_many_pins(pins, self.max_bytes)
        for key in moved:
            uses = self._uses[key]
            self._add(self._pinned if pinned else self._small, key, self._taken(key), uses)
        self._until |= {} if until is None else dict.fromkeys(held, until)
        return len(held)

    def ends(self, key: str) -> float:
        """When an entry's time is over; infinite for never."""
        return self._until.get(key, math.inf)

    def pop(self, key: str) -> V | None:
        """Take an entry out, and forget that it was there."""
        self._gone.pop(key, None)
        self._until.pop(key, None)
        return self._taken(key) if key in self._uses else None

    def _is_over(self, key: str) -> bool:
        return self.ends(key) <= time.time()

    def _queue(self, key: str) -> dict[str, V]:
        queues: tuple[dict[str, V], ...] = (self._small, self._main, self._pinned)
        return next(queue for queue in queues if key in queue)

    def _add(self, queue: dict[str, V], key: str, value: V, uses: int) -> None:
        queue[key], self._uses[key] = value, uses
        self._count(queue, self._size(value))

    def _taken(self, key: str) -> V:
        queue = self._queue(key)
        value = queue.pop(key)
        del self._uses[key]
        self._count(queue, -self._size(value))
        return value

    def _count(self, queue: dict[str, V], nbytes: int) -> None:
        self.nbytes += nbytes
        self._small_bytes += nbytes if queue is self._small else 0
        self._pinned_bytes += nbytes if queue is self._pinned else 0

    def _make_room(self) -> None:
        """Let the oldest entry of a queue leave, or move on if it was used."""
        is_small = not self._main or self._small_bytes >= SMALL_SHARE * self.max_bytes
        is_small = is_small and bool(self._small)
        key = next(iter(self._small if is_small else self._main))
        uses, value = self._uses[key], self._taken(key)
        if uses:
            self._add(self._main, key, value, 0 if is_small else uses - 1)
            return
        self._until.pop(key, None)
        if is_small:
            self._gone[key] = None
            while len(self._gone) > len(self._uses) - len(self._pinned) + 1:
                self._gone.popitem(last=False)
