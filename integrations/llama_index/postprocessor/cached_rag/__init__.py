"""A node postprocessor that makes a model know what the ones before it made of nodes."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.postprocessor.cached_rag.base import CachedPostprocessor

__all__ = ["CachedPostprocessor"]
