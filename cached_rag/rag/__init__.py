"""Documents: loading, splitting, embedding, and an index to search them.

A name is imported when it is first used: the process that reads documents loads no model library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cached_rag.lazily import imports_from

if TYPE_CHECKING:
    from cached_rag.rag.document import Document
    from cached_rag.rag.embedding import Embedder, Embeddings
    from cached_rag.rag.finding import find_documents, look_at
    from cached_rag.rag.hit import Hit
    from cached_rag.rag.index import DocumentIndex, IndexedDocument
    from cached_rag.rag.limits import DocumentLimits
    from cached_rag.rag.readers import READERS, load_document
    from cached_rag.rag.settings import IndexConfig, Reranking, Retrieval
    from cached_rag.rag.splitting import Chunk, Splitter

_PLACES = {
    "document": ("Document",),
    "embedding": ("Embedder", "Embeddings"),
    "finding": ("find_documents", "look_at"),
    "hit": ("Hit",),
    "index": ("DocumentIndex", "IndexedDocument"),
    "limits": ("DocumentLimits",),
    "readers": ("READERS", "load_document"),
    "settings": ("IndexConfig", "Reranking", "Retrieval"),
    "splitting": ("Chunk", "Splitter"),
}

__all__ = [
    "READERS",
    "Chunk",
    "Document",
    "DocumentIndex",
    "DocumentLimits",
    "Embedder",
    "Embeddings",
    "Hit",
    "IndexConfig",
    "IndexedDocument",
    "Reranking",
    "Retrieval",
    "Splitter",
    "find_documents",
    "load_document",
    "look_at",
]

__getattr__ = imports_from(_PLACES, __name__, __name__)
