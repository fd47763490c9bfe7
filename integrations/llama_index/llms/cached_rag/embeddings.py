"""sentence-transformers as LlamaIndex embeddings, with the models `cached_rag` can find."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

from cached_rag import Embedder


class SentenceTransformerEmbedding(BaseEmbedding):
    """Unit vectors from a sentence-transformers model, loaded when first used.

    Example:
        Settings.embed_model = SentenceTransformerEmbedding()

    Raises:
        cached_rag.errors.ModelNotFoundError: at the first use, the model cannot be loaded.
    """

    model_name: str = Field(
        default="all-minilm-l6-v2", description="A hub id or folder, or this alias."
    )
    device: str | None = Field(default=None, description="None: the best this machine has.")
    _embedder: Embedder = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Nothing is loaded yet."""
        super().model_post_init(context)
        self._embedder = Embedder(self.model_name, self.device)

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "SentenceTransformerEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._embedder.embed(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)
