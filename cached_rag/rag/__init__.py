"""Documents: loading, splitting, embedding, and an index to search them."""

from cached_rag.rag.document import Document
from cached_rag.rag.embedding import DEFAULT_EMBEDDING, Embedder, Embeddings
from cached_rag.rag.hit import Hit
from cached_rag.rag.index import DocumentIndex, IndexedDocument
from cached_rag.rag.readers import READERS, find_documents, load_document, look_at
from cached_rag.rag.splitting import Chunk, Splitter

__all__ = [
    "DEFAULT_EMBEDDING",
    "READERS",
    "Chunk",
    "Document",
    "DocumentIndex",
    "Embedder",
    "Embeddings",
    "Hit",
    "IndexedDocument",
    "Splitter",
    "find_documents",
    "load_document",
    "look_at",
]
