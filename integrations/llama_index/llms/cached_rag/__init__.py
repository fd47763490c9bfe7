"""LlamaIndex models that reuse the KV of text they have read before."""

from llama_index.llms.cached_rag.base import CachedRAGLLM

__all__ = ["CachedRAGLLM"]
