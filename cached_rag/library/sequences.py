"""KV of whole runs of modules as a prompt left it: the prefix tree over module sequences.

Where a prompt begins with the same text and the same modules in the same order as an earlier one,
the earlier one's repaired KV is taken as it is. A node is a module and the text before it; its key
is the digest of the path to it, so shared beginnings are kept once and a node without its parents
is never found. Knows tokens and KV; knows no model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cached_rag.errors import StoreFullError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.fingerprint import digest, ids_digest
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store import MemoryStore

# KV that is what full prefill computes serves every method; repaired KV only its own.
EXACT = "exact"


class SequenceTree:
    """At most `max_bytes` of KV, least recently used nodes out first; 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._store = MemoryStore(max(1, max_bytes))
        self._paths: dict[tuple[str, ...], str] = {}
        self._lock = threading.RLock()  # as in `WriteBack`
        self.is_on = max_bytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._store.nbytes

    def find(self, kind: str, ids: Sequence[int], ends: Sequence[int]) -> list[ModuleKV]:
        """KV of the longest known beginning of a prompt, in pieces, each where it stood.

        Args:
            kind: what repaired it, or `EXACT`.
            ids: the prompt.
            ends: where its modules end, ascending.
        """
        found: list[ModuleKV] = []
        for key, begin, end in _nodes(kind, ids, ends):
            kv = self._store.get(key, ids[begin:end]) if self.is_on else None
            if kv is None:
                break
            found.append(kv)
        return found

    def add(
        self,
        kind: str,
        ids: Sequence[int],
        ends: Sequence[int],
        names: Sequence[str],
        buffer: KVBuffer,
    ) -> None:
        """Keep a prompt's KV up to the end of its last module.

        Args:
            names: of the modules that end at `ends`, for `order`.
            buffer: the prompt's complete KV.
        """
        if not self.is_on:
            return
        for count, (key, begin, end) in enumerate(_nodes(kind, ids, ends), 1):
            with self._lock:
                self._paths[tuple(names[:count])] = key
            if key not in self._store:
                try:
                    self._store.put(key, buffer.read(begin, end, tuple(ids[begin:end])))
                except StoreFullError:
                    return

    def order(self, names: Sequence[str]) -> list[int]:
        """Indices of modules so that they follow a known path as far as one goes.

        Where a path branches, the one that comes first in `names` is taken; what is on no path
        keeps its order behind the others.
        """
        path: tuple[str, ...] = ()
        taken: list[int] = []
        left = list(range(len(names)))
        with self._lock:
            while (step := self._next(path, names, left)) is not None:
                path = (*path, names[step])
                taken.append(step)
                left.remove(step)
        return [*taken, *left]

    def _next(self, path: tuple[str, ...], names: Sequence[str], left: list[int]) -> int | None:
        return next((i for i in left if self._is_known((*path, names[i]))), None)

    def _is_known(self, path: tuple[str, ...]) -> bool:
        key = self._paths.get(path)
        if key is not None and key not in self._store:
            del self._paths[path]
            return False
        return key is not None


def _nodes(kind: str, ids: Sequence[int], ends: Sequence[int]) -> list[tuple[str, int, int]]:
    """(key, begin, end) of each node on a prompt's path."""
    nodes, key, begin = [], kind, 0
    for end in ends:
        key = digest(key, ids_digest(ids[begin:end]))
        nodes.append((key, begin, end))
        begin = end
    return nodes
