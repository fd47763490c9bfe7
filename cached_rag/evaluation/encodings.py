"""An engine for each way of encoding modules, all of one model, so that they do not mix.

Knows what stands before a module; knows no method.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from cached_rag.backends.base import Backend
from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.prompts import messages
from cached_rag.library.context import PRIMER, Context
from cached_rag.rag import DEFAULT_EMBEDDING, Embedder, Embeddings

_MARK = "the first chunk"


class Encodings:
    """Engines by encoding, for one set of examples."""

    def __init__(
        self,
        model: Backend,
        examples: Sequence[Example],
        *,
        long: bool,
        embedder: Embeddings | None = None,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self._model, self._long, self._memory = model, long, memory_bytes
        self._pool = list(dict.fromkeys(chunk for e in examples for chunk in e.chunks))
        self._embedder = embedder
        self._near: Callable[[str, int], list[str]] | None = None
        self._engines: dict[str, Engine] = {}

    def engine(self, encoding: str, chunks: Sequence[str]) -> Engine:
        """The engine for an encoding (empty: none), with these chunks encoded."""
        if encoding not in self._engines:
            store = StoreConfig(memory_bytes=self._memory, learn_prefixes=False)
            self._engines[encoding] = Engine(self._model, store)
        engine = self._engines[encoding]
        if not encoding:
            return engine
        head = None
        if encoding not in ("alone", "alone-primer"):
            head = engine.head(messages([_MARK], "?", long=self._long), _MARK)
        kind, _, count = encoding.partition(":")
        if kind in ("both", "neighbours"):  # the prompt's first chunk is exact then
            engine.encode(chunks, head)
        engine.encode(chunks, head, context=self._context(kind, int(count or 1)))
        return engine

    def _context(self, kind: str, count: int) -> Context | None:
        if kind in ("primer", "both", "alone-primer"):
            return PRIMER
        if kind == "neighbours":
            return Context(f"neighbours:{count}", lambda text: self._neighbours(text, count))
        if kind == "strangers":
            return Context(f"strangers:{count}", lambda text: self._strangers(text, count))
        return None

    def _strangers(self, text: str, count: int) -> list[str]:
        """Chunks of the same set, drawn at random; the same ones every time."""
        others = [chunk for chunk in self._pool if chunk != text]
        return random.Random(text).sample(others, min(count, len(others)))

    def _neighbours(self, text: str, count: int) -> list[str]:
        """The nearest chunks of the same set, the nearest last."""
        if self._near is None:
            self._near = nearest(self._pool, self._embedder or Embedder(DEFAULT_EMBEDDING))
        return self._near(text, count)


def nearest(texts: Sequence[str], embedder: Embeddings) -> Callable[[str, int], list[str]]:
    """A look-up of the texts nearest to one of them, the nearest last."""
    vectors = np.asarray(embedder.embed(list(texts)), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = {text: row for row, text in enumerate(texts)}

    def look_up(text: str, count: int) -> list[str]:
        similarity = vectors @ vectors[rows[text]]
        similarity[rows[text]] = -np.inf
        order = np.argsort(-similarity)[: min(count, len(texts) - 1)]
        return [texts[row] for row in reversed(order)]

    return look_up
