"""FAISS over a table of documents, built anew when the table changes.

Knows vectors and filters; knows no embedding and no model.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from langchain_core.documents import Document
from numpy.typing import NDArray

from langchain_cached_rag.documents import DocumentTable
from langchain_cached_rag.filters import Filter, as_predicate


@dataclass(frozen=True)
class Hit:
    """A document that a search found; `score` is the cosine similarity."""

    document: Document
    score: float
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class _Snapshot:
    """FAISS over all vectors, and the metadata, by row."""

    version: tuple[int, int]
    index: Any
    metadata: dict[int, dict[str, Any]]


class VectorIndex:
    """Exact search by cosine similarity. Safe for several threads."""

    def __init__(self, table: DocumentTable) -> None:
        self._table = table
        self._snapshot: _Snapshot | None = None
        self._lock = threading.Lock()

    def search(self, vector: list[float], k: int, wanted: Filter | None) -> list[Hit]:
        """The k documents nearest to a vector, best first.

        Raises:
            ValueError: a vector of another length than the documents', or a bad filter.
        """
        query = self.checked([vector])
        now = self._up_to_date()
        if now is None:
            return []
        options, total = {}, len(now.metadata)
        if wanted is not None:
            holds = as_predicate(wanted)
            rows = [row for row, about in now.metadata.items() if holds(about)]
            selector: Any = faiss.IDSelectorBatch(np.array(rows, np.int64))
            options, total = {"params": _parameters(selector)}, len(rows)
        if not min(k, total):
            return []
        scores, found = now.index.search(query, min(k, total), **options)
        documents = self._table.by_rows(found[0].tolist())
        return [
            Hit(documents[row], float(score), now.index.reconstruct(row))
            for row, score in zip(found[0].tolist(), scores[0], strict=True)
            if row in documents  # else deleted by another process since
        ]

    def checked(self, vectors: list[list[float]]) -> NDArray[np.float32]:
        """(n, dim) float32 rows of unit length; a zero vector stays zero.

        Raises:
            ValueError: vectors of another length than the documents'.
        """
        rows = np.array(vectors, np.float32)
        width = self._table.width()
        if width is not None and width != rows.shape[1]:
            raise ValueError(
                f"the store's vectors have {width} dimensions, this embedding's "
                f"{rows.shape[1]}; open it with the embedding it was made with, or make another"
            )
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.maximum(lengths, 1e-12), np.float32)

    def _up_to_date(self) -> _Snapshot | None:
        """FAISS as the documents are now; None if there are none."""
        with self._lock:
            version = self._table.version()
            if self._snapshot is None or self._snapshot.version != version:
                rows, metadata, vectors = self._table.contents()
                if not rows:
                    return None
                index = faiss.IndexIDMap2(faiss.IndexFlatIP(len(vectors[0])))
                index.add_with_ids(np.stack(vectors), np.array(rows, np.int64))
                about = dict(zip(rows, metadata, strict=True))
                self._snapshot = _Snapshot(version, index, about)
            return self._snapshot


def _parameters(selector: Any) -> Any:
    parameters: Any = faiss.SearchParameters
    return parameters(sel=selector)
