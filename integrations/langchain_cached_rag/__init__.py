"""LangChain on models that reuse the KV of text they have read before."""

from cached_rag.errors import needs_extra

with needs_extra("langchain", "the integration with LangChain"):
    from langchain_cached_rag.chat_models import ChatCachedRAG
    from langchain_cached_rag.llms import CachedRAGLLM
    from langchain_cached_rag.messages import CacheReportHandler, PMLPromptTemplate
    from langchain_cached_rag.retrievers import CachedRetriever
    from langchain_cached_rag.vectorstores import (
        CachedRAGVectorStore,
        SentenceTransformerEmbeddings,
    )

__all__ = [
    "CacheReportHandler",
    "CachedRAGLLM",
    "CachedRAGVectorStore",
    "CachedRetriever",
    "ChatCachedRAG",
    "PMLPromptTemplate",
    "SentenceTransformerEmbeddings",
]
