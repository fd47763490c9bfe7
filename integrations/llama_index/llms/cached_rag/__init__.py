"""LlamaIndex models that reuse the KV of text they have read before."""

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.llms.cached_rag.base import CachedRAGLLM
    from llama_index.llms.cached_rag.callbacks import CacheReportHandler
    from llama_index.llms.cached_rag.embeddings import SentenceTransformerEmbedding
    from llama_index.llms.cached_rag.nodes import MarkModules, bare_text, marked, module_text
    from llama_index.llms.cached_rag.reading import Reader
    from llama_index.llms.cached_rag.schemas import PMLPromptTemplate

__all__ = [
    "CacheReportHandler",
    "CachedRAGLLM",
    "MarkModules",
    "PMLPromptTemplate",
    "Reader",
    "SentenceTransformerEmbedding",
    "bare_text",
    "marked",
    "module_text",
]
