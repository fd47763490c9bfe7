"""Finds heads of prompts that are worth keeping: those of templates, and of nothing else.

The head of a template recurs before ever different chunks, the history of a conversation does not.
A head with the question in it recurs, too, if a model is asked about each chunk by itself; but then
what stands behind the chunk is always the same. Knows digests; encodes nothing.
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
        self._seen: LRUCache[tuple[int, ...], tuple[set[str], set[str]]] = LRUCache(remembered)
        self._lock = threading.RLock()  # as in `WriteBack`

    def learn(self, head: tuple[int, ...], chunk: str, rest: str) -> bool:
        """Note what a head stood before.

        Args:
            head: the head's tokens.
            chunk: the digest of the first chunk behind it.
            rest: the digest of what stood behind the last one.

        Returns:
            Whether the head is learned: two chunks and two rests have followed it.
        """
        with self._lock:
            if head in self._learned:
                return True
            chunks, rests = self._seen.setdefault(head, (set(), set()))
            for seen, new in ((chunks, chunk), (rests, rest)):
                if len(seen) < 2:
                    seen.add(new)
            if min(len(chunks), len(rests)) < 2 or len(self._learned) >= self._room:
                return False
            self._learned.add(head)
            return True
