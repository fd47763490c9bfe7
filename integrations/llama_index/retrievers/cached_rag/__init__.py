"""A retriever that makes a model know what comes out of it."""

from llama_index.retrievers.cached_rag.base import CachedRetriever

__all__ = ["CachedRetriever"]
