"""The last of a query engine's postprocessors: the model is told of nodes as it will read them."""

from llama_index.llms.cached_rag.retrieval import CachedPostprocessor

__all__ = ["CachedPostprocessor"]
