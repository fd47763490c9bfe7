"""Response synthesis that leaves chunks whole."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.response_synthesizers.cached_rag.base import CachedSynthesizer, WholeChunks

__all__ = ["CachedSynthesizer", "WholeChunks"]
