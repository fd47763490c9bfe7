"""Which chunks of a set are near each other, and near a question. Knows no KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cached_rag.evaluation.data import Example
from cached_rag.rag import DEFAULT_EMBEDDING, Embedder

_WORDS = 6  # of a chunk, in a line that names it


class Nearness:
    """Cosine similarities within one data set; the embedding model loads when first asked."""

    def __init__(self, pool: Sequence[str]) -> None:
        self._pool = pool
        self._embedder = Embedder(DEFAULT_EMBEDDING)

    def before(self, text: str, count: int) -> list[str]:
        """The chunks that are most similar to one of them, the nearest one last."""
        own = self._pool.index(text)
        similarity = self._vectors @ self._vectors[own]
        similarity[own] = -np.inf
        order = np.argsort(-similarity)[: min(count, len(self._pool) - 1)]
        return [self._pool[row] for row in reversed(order)]

    def ranked(self, example: Example) -> list[str]:
        """An example's chunks in a retriever's order, the nearest to the question first."""
        question = np.asarray(self._embedder.embed([example.question])[0])
        rows = [self._pool.index(chunk) for chunk in example.chunks]
        order = np.argsort(-(self._vectors[rows] @ question), kind="stable")
        return [example.chunks[place] for place in order]

    def arranged(self, order: str, example: Example) -> list[str]:
        """An example's chunks as they stand in a prompt.

        Args:
            order: empty for the set's; "reversed", "nearest", "shuffled" (as another question's
                prompt might have had them), or "told", which is "shuffled" with a line behind the
                chunks that says which of them are the nearest (RAGBoost).
        """
        chunks = list(example.chunks)
        if order == "reversed":
            return chunks[::-1]
        if order == "nearest":
            return self.ranked(example)
        if order:
            random.Random(example.id).shuffle(chunks)
        return [*chunks, _told(self.ranked(example))] if order == "told" else chunks

    @cached_property
    def _vectors(self) -> Any:
        """(num_chunks, dim) float32 embeddings, each of length 1."""
        vectors = np.asarray(self._embedder.embed(self._pool), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _told(ranked: Sequence[str]) -> str:
    """A line that keeps the rank of chunks which do not stand in its order."""
    names = [f'"{" ".join(chunk.split()[:_WORDS])} ..."' for chunk in ranked]
    return "Read the documents in this order of importance: " + " > ".join(names)
