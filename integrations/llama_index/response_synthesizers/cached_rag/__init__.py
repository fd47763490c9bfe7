"""Response synthesis that leaves modules whole."""

from cached_rag import MissingPackageError

try:
    from llama_index.response_synthesizers.cached_rag.base import CachedSynthesizer, WholeChunks
except ModuleNotFoundError as error:
    raise MissingPackageError("the integration with LlamaIndex", "llama-index", error) from error

__all__ = ["CachedSynthesizer", "WholeChunks"]
