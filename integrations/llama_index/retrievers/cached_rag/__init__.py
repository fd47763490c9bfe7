"""A retriever around any other, that makes a model know what comes out of it."""

from llama_index.llms.cached_rag.retrieval import CachedRetriever

__all__ = ["CachedRetriever"]
