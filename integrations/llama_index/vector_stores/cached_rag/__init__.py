"""A vector store whose nodes' KV comes and goes with them."""

from llama_index.vector_stores.cached_rag.base import CachedVectorStore

__all__ = ["CachedVectorStore"]
