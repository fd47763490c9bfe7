"""Which KV leaves where room is short: S3-FIFO, as three queues in memory.

New entries enter a small queue, a tenth of the room. One that is used there moves to the main
queue; one that is not leaves, and its key is remembered for a while: if it comes back, it enters
the main queue. There an entry goes round once for each use, up to three, before it leaves. So
texts that are ingested and never asked for do not push out those that are asked for every day, and
what was popular last year leaves all the same (docs/scale.md has hit rates). An entry's cost to
compute again grows with its bytes, in one model, so that neither decides.

What is pinned is in no queue.

From S3-FIFO (Yang et al., SOSP 2023, https://doi.org/10.1145/3600006.3613147), section 4. Files on
disk have the same queues in their table (`entries.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from cached_rag.errors import StoreFullError

# The small queue's share of the room, and the most uses that count.
SMALL_SHARE, MOST_USES = 0.1, 3
NO_ROOM = (
    "pinned KV takes {held} of the {max_bytes} bytes that this store may have, and too few are "
    "left; raise its bound, or unpin some"
)
V = TypeVar("V")


class Evicting(Generic[V]):
    """A mapping of at most `max_bytes` bytes. Not safe for several threads."""

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        """Make it empty.

        Args:
            size: bytes of an entry.
        """
        self.max_bytes, self._size = max_bytes, size
        self.nbytes = self._small_bytes = 0
        self._small: OrderedDict[str, V] = OrderedDict()
        self._main: OrderedDict[str, V] = OrderedDict()
        self._uses: dict[str, int] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._pinned: dict[str, V] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: str) -> bool:
        return key in self._uses

    def values(self) -> Iterator[V]:
        """All entries."""
        yield from self._small.values()
        yield from self._main.values()
        yield from self._pinned.values()

    def get(self, key: str) -> V | None:
        """An entry, which counts as a use; None if it is not there."""
        if key not in self._uses:
            return None
        self._uses[key] = min(MOST_USES, self._uses[key] + 1)
        return self._queue(key)[key]

    def put(self, key: str, value: V) -> None:
        """Add an entry, or replace it; others leave for it.

        Raises:
            StoreFullError: what is pinned leaves too little room; nothing is changed.
        """
        held = sum(self._size(one) for name, one in self._pinned.items() if name != key)
        if held + self._size(value) > self.max_bytes:
            raise StoreFullError(NO_ROOM.format(held=held, max_bytes=self.max_bytes))
        queue = self._queue(key) if key in self else self._small
        queue = self._main if key in self._gone else queue
        uses = self._uses.get(key, 0)
        self.pop(key)
        while self.nbytes + self._size(value) > self.max_bytes:
            self._make_room()
        self._add(queue, key, value, uses)

    def pin(self, key: str, *, pinned: bool) -> None:
        """Have an entry, if it is there, stay whatever comes, or leave as others do."""
        if key in self and pinned != (key in self._pinned):
            uses = self._uses[key]
            self._add(self._pinned if pinned else self._small, key, self._taken(key), uses)

    def _queue(self, key: str) -> dict[str, V]:
        queues: tuple[dict[str, V], ...] = (self._small, self._main, self._pinned)
        return next(queue for queue in queues if key in queue)

    def pop(self, key: str) -> V | None:
        """Take an entry out, and forget that it was there."""
        self._gone.pop(key, None)
        return self._taken(key) if key in self._uses else None

    def _add(self, queue: dict[str, V], key: str, value: V, uses: int) -> None:
        queue[key], self._uses[key] = value, uses
        self.nbytes += self._size(value)
        self._small_bytes += self._size(value) if queue is self._small else 0

    def _taken(self, key: str) -> V:
        is_small = key in self._small
        value = self._queue(key).pop(key)
        del self._uses[key]
        self.nbytes -= self._size(value)
        self._small_bytes -= self._size(value) if is_small else 0
        return value

    def _make_room(self) -> None:
        """Let the oldest entry of a queue leave, or move on if it was used."""
        is_small = not self._main or self._small_bytes >= SMALL_SHARE * self.max_bytes
        key = next(iter(self._small if is_small else self._main))
        uses, value = self._uses[key], self._taken(key)
        if uses:
            self._add(self._main, key, value, 0 if is_small else uses - 1)
        elif is_small:
            self._gone[key] = None
            while len(self._gone) > len(self._uses) + 1:
                self._gone.popitem(last=False)
