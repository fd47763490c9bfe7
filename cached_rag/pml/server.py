"""An engine's schemas: each is laid out once, and encoded when it is wanted.

Knows one model and its library; the counterpart of `encoder.py` for modules that a schema names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from cachetools import LRUCache

from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.backends.transformers.encode import EncodeSummary
from cached_rag.backends.transformers.loading import LanguageModel
from cached_rag.library.library import Library
from cached_rag.pml.encode import Encoded
from cached_rag.pml.planner import SchemaPlanner, planner_of
from cached_rag.pml.schema import Schema, SchemaPrompt

_REMEMBERED = 64


class SchemaServer:
    """Plans and encodes schemas on one model. Safe for several threads.

    Args:
        lock: held while the model is used.
    """

    def __init__(
        self,
        model: LanguageModel,
        library: Library,
        tokenization: Tokenization,
        lock: threading.Lock,
    ) -> None:
        self._model, self._library, self._tokenization = model, library, tokenization
        self._lock, self._compiling = lock, threading.Lock()
        self._planners: LRUCache[str, SchemaPlanner] = LRUCache(_REMEMBERED)

    def planner(self, schema: Schema) -> SchemaPlanner:
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

    def count_tokens(self, prompt: SchemaPrompt) -> int:
        """How many tokens a prompt has."""
        pieces = self.planner(prompt.schema).assembler.pieces(prompt.turns)
        return sum(len(piece.ids) for piece in pieces)

    def missing(self, schema: Schema) -> list[str]:
        """Names of what `encode` would prefill; empty for text that is in every prompt."""
        return [unit.name for unit in self.planner(schema).missing()]

    def encode(
        self, schema: Schema, progress: Callable[[str], object] = lambda _: None
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
