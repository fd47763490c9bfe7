"""Finds heads of prompts that are worth keeping: beginnings that recur before different chunks.

The head of a template recurs before ever different chunks, the history of a conversation does not.
Knows token ids and digests; encodes nothing.
"""

from __future__ import annotations

import threading

from cachetools import LRUCache

_REMEMBERED = 256
_LEARNED = 8


class Heads:
    """The heads of recent prompts, and those that recurred. Safe for several threads.

    Args:
        learned: how many heads may be learned. There is a bound because every prompt is compared
            with each of them.
        remembered: how many heads of recent prompts are kept for comparison.
    """

    def __init__(self, learned: int = _LEARNED, remembered: int = _REMEMBERED) -> None:
        self._room = learned
        self._learned: set[tuple[int, ...]] = set()
        self._first: LRUCache[tuple[int, ...], str] = LRUCache(remembered)
        self._lock = threading.RLock()  # as in `WriteBack`

    def learn(self, head: tuple[int, ...], chunk: str) -> bool:
        """Note that a head stood before a chunk.

        Args:
            head: the head's tokens.
            chunk: the digest of the first chunk behind it.

        Returns:
            Whether the head is learned: it has stood before two different chunks.
        """
        with self._lock:
            if head in self._learned:
                return True
            if self._first.setdefault(head, chunk) == chunk or len(self._learned) >= self._room:
                return False
            self._learned.add(head)
            return True
