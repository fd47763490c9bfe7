"""An engine's schemas: each is laid out once, and encoded when it is wanted.

The counterpart of `encoder.py` for modules that a schema names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from cachetools import LRUCache

from cached_rag.backends.thread import on_model_thread
from cached_rag.engine.engine import Engine
from cached_rag.library.encode import EncodeSummary
from cached_rag.pml.encode import Encoded
from cached_rag.pml.planner import LaidOut, SchemaPlanner, planner_of

_REMEMBERED = 64
_SERVERS: WeakKeyDictionary[Engine, SchemaServer] = WeakKeyDictionary()
_SERVING = threading.Lock()


def schemas_of(engine: Engine) -> SchemaServer:
    """What lays out and encodes schemas on an engine.

    Raises:
        ClosedError: the engine was closed.
    """
    engine.check_open()
    with _SERVING:
        return _SERVERS.setdefault(engine, SchemaServer(engine))


class SchemaServer:
    """Plans and encodes schemas on one engine. Safe for several threads."""

    def __init__(self, engine: Engine) -> None:
        # Not the engine itself, by which this is found as long as it lives.
        self._model, self._library = engine.model, engine.library
        self._tokenization, self._lock = engine.tokenization, engine.lock
        self._compiling = threading.Lock()
        self._planners: LRUCache[str, SchemaPlanner] = LRUCache(_REMEMBERED)

    def planner(self, schema: LaidOut) -> SchemaPlanner:
        """A schema's layout and encodings.

        Raises:
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        with self._compiling:
            found = self._planners.get(schema.digest)
            if found is None:
                found = planner_of(schema, self._model, self._library, self._tokenization)
                self._planners[schema.digest] = found
            return found

    def missing(self, schema: LaidOut) -> list[str]:
        """See `Schema.missing`."""
        return [unit.name for unit in self.planner(schema).missing()]

    def encode(
        self, schema: LaidOut, progress: Callable[[str], object] = lambda _: None
    ) -> EncodeSummary:
        """See `Schema.encode`."""
        planner = self.planner(schema)
        started = time.perf_counter()

        def encode() -> tuple[int, Encoded]:
            with self._lock, torch.inference_mode():
                missing = planner.missing()
                named = planner.encoder.encode(missing, lambda unit: progress(unit.name))
                return len(missing), named

        count, done = on_model_thread(encode)
        if done.problem is not None:
            raise done.problem
        present = len(planner.units) - count
        return EncodeSummary(count, present, (), done.tokens, time.perf_counter() - started)
