"""A vector store whose nodes' KV comes and goes with them."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.vector_stores.cached_rag.base import CachedVectorStore

__all__ = ["CachedVectorStore"]
