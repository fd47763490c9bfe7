"""A vector store whose nodes' KV comes and goes with them."""

from cached_rag import MissingPackageError

try:
    from llama_index.vector_stores.cached_rag.base import CachedVectorStore
except ModuleNotFoundError as error:
    raise MissingPackageError("the integration with LlamaIndex", "llama-index", error) from error

__all__ = ["CachedVectorStore"]
