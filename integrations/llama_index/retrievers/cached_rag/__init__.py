"""A retriever that makes a model know what comes out of it."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.retrievers.cached_rag.base import CachedRetriever

__all__ = ["CachedRetriever"]
