"""A retriever that makes a model know what comes out of it."""

from cached_rag import MissingPackageError

try:
    from llama_index.retrievers.cached_rag.base import CachedRetriever
except ModuleNotFoundError as error:
    raise MissingPackageError("the integration with LlamaIndex", "llama-index", error) from error

__all__ = ["CachedRetriever"]
