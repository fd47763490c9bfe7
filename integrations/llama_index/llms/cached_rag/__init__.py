"""LlamaIndex models that reuse the KV of text they have read before."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.llms.cached_rag.base import CachedRAGLLM, unwrapped
    from llama_index.llms.cached_rag.messages import CacheReportHandler, PMLPromptTemplate
    from llama_index.llms.cached_rag.nodes import SentenceTransformerEmbedding, module_text

__all__ = [
    "CacheReportHandler",
    "CachedRAGLLM",
    "PMLPromptTemplate",
    "SentenceTransformerEmbedding",
    "module_text",
    "unwrapped",
]
