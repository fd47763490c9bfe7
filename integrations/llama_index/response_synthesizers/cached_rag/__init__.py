"""Response synthesis that leaves modules whole."""

from llama_index.response_synthesizers.cached_rag.base import CachedSynthesizer, WholeChunks

__all__ = ["CachedSynthesizer", "WholeChunks"]
