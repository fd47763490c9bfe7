"""Sees that an index's vectors are its embedding model's, and makes them anew if they are not.

A model's files may be replaced under the same name. Vectors of two models have nothing to do with
each other: a search would find the wrong chunks, and nothing would fail. So some chunks are
embedded again before the first search, and their vectors compared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from cached_rag.errors import IndexMismatchError
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.index import DocumentIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
_COMPARED = 3
# Most distance between a text's vectors by one model, on other devices and in other dtypes, too; of
# unit vectors it is a cosine of .999.
_SAME = 0.045


def see_same_vectors(index: DocumentIndex, embedder: Embeddings) -> None:
    """Embed all chunks of an index again, unless the last ones have the vectors they would get.

    Raises:
        IndexMismatchError: they have others, and this user may not write the index.
    """
    kept = index.last_vectors(_COMPARED)
    if not kept:
        return
    found = embedder.embed(list(kept))
    if all(_is_same(old, new) for old, new in zip(kept.values(), found, strict=True)):
        return
    if index.is_read_only:
        raise IndexMismatchError(
            f"the embedding model {embedder.name} is not the one that this index was made with, "
            "and the index is read-only for this user: let one who may write it open it once, "
            "which embeds its chunks anew"
        )
    _log.warning(
        "the embedding model %s is not the one that this index was made with: its %d chunks are "
        "embedded anew",
        *(embedder.name, index.count()[1]),
    )
    index.embed_again(embedder)


def _is_same(old: NDArray[np.float32], new: NDArray[np.float32]) -> bool:
    return old.shape == new.shape and float(np.linalg.norm(old - new)) <= _SAME
