"""Learns what prompts say before their first module, so that it is reused without loss.

A template's head recurs before ever other modules; a conversation's history does not. Knows token
ids and names; encodes nothing.
"""

from __future__ import annotations

import threading

from cachetools import LRUCache

_REMEMBERED = 256
_LEARNED = 8


class Heads:
    """The beginnings of recent prompts, and those that recurred. Safe for several threads.

    Only so many are learned in a process: each is one more to look for in every prompt.
    """

    def __init__(self, learned: int = _LEARNED, remembered: int = _REMEMBERED) -> None:
        self._room = learned
        self._learned: set[tuple[int, ...]] = set()
        self._first: LRUCache[tuple[int, ...], str] = LRUCache(remembered)
        self._lock = threading.RLock()  # as in `WriteBack`

    def learn(self, head: tuple[int, ...], module: str) -> bool:
        """Whether a beginning that now stood before a module has stood before another one."""
        with self._lock:
            if head in self._learned:
                return True
            if self._first.setdefault(head, module) == module or len(self._learned) >= self._room:
                return False
            self._learned.add(head)
            return True
