"""LangChain models that reuse the KV of text they have read before."""

from langchain_cached_rag.chat_models import ChatCachedRAG

__all__ = ["ChatCachedRAG"]
