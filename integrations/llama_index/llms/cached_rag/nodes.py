"""Nodes as chunks: what text and vectors they become, and who reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from pydantic import Field, PrivateAttr

from cached_rag import Embedder
from cached_rag.spi import Learner


def module_text(node: BaseNode) -> str:
    """A node's text as response synthesis puts it in a prompt."""
    return str(node.get_content(metadata_mode=MetadataMode.LLM))


def bare_text(node: BaseNode) -> str:
    """A node's text without metadata, as citations put it in a prompt."""
    return str(node.get_content(metadata_mode=MetadataMode.NONE))


class Reader(Learner):
    """A model that will read nodes, and what is to happen to those that have no KV."""

    def expect(self, nodes: Sequence[NodeWithScore]) -> None:
        """Nodes with metadata as synthesis shows it, and without, as citations have them."""
        shown = [module_text(node.node) for node in nodes]
        bare = [bare_text(node.node) for node in nodes]
        self.learn(shown)
        if self.encode != "off":
            replace(self, encode="background").learn(bare)
        # The engine remembers so many: those shown come last, and are forgotten last.
        self.llm.prefetch(dict.fromkeys([*bare, *shown]))

    def ordered(self, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
        """The nodes in an order in which an earlier prompt began with them."""
        return [nodes[at] for at in self.llm.order(module_text(node.node) for node in nodes)]


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
    device: str | None = Field(default=None, description="None: CUDA, else the CPU.")
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
        return list(self._embedder.embed(texts).tolist())

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
