"""Keeps each engine's planners, so that a schema is laid out once per engine. Knows no schema."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from cachetools import LRUCache

from cached_rag.engine.engine import Engine
from cached_rag.pml.planner import SchemaPlanner

_REMEMBERED = 64


@dataclass(frozen=True)
class _Known:
    """The planners of one engine."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    planners: LRUCache[str, SchemaPlanner] = field(default_factory=lambda: LRUCache(_REMEMBERED))


_KNOWN: WeakKeyDictionary[Engine, _Known] = WeakKeyDictionary()
_LOOKING = threading.Lock()


def known_planner(engine: Engine, key: str, make: Callable[[], SchemaPlanner]) -> SchemaPlanner:
    """The planner of a key on an engine; made now, if there is none. Safe for several threads.

    Raises:
        ClosedError: the engine was closed.
    """
    engine.check_open()
    with _LOOKING:
        known = _KNOWN.setdefault(engine, _Known())
    with known.lock:
        found = known.planners.get(key)
        if found is None:
            found = known.planners[key] = make()
        return found
