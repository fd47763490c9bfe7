"""What brings nodes to the model: it is told of them as it will read them."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.cached_rag.base import unwrapped
from llama_index.llms.cached_rag.nodes import Reader
from pydantic import PrivateAttr

from cached_rag.spi import Encode, checked


class CachedRetriever(BaseRetriever):
    """Returns what the retriever inside returns, and sees that the model can reuse it.

    Where postprocessors give nodes other texts, use `CachedPostprocessor`.

    Example:
        retriever = CachedRetriever(index.as_retriever(similarity_top_k=6), llm=llm)
        RetrieverQueryEngine.from_args(retriever, llm=llm)
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM,
        *,
        encode: Encode = "background",
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
        reorder: bool = False,
        **kwargs: Any,
    ) -> None:
        """Wrap a retriever.

        Args:
            encode: what happens to nodes that have no KV; see `cached_rag.spi.Learner`.
            prompt, variable: the template nodes go to, for "eager"; see `CachedRAGLLM.encode`.
            reorder: return nodes in an order in which an earlier prompt began with them, so that
                its KV is reused without loss; the others behind, in the retriever's order.
            kwargs: `BaseRetriever`'s.

        Raises:
            cached_rag.ConfigError: `retriever` or `llm` is of another kind, there is no such
                `encode`, or `prompt` is no template.
        """
        self._reader = Reader(unwrapped(llm), encode, {"prompt": prompt, "variable": variable})
        # One that did not call its base's constructor has none before it is asked.
        manager = getattr(retriever, "callback_manager", Settings.callback_manager)
        super().__init__(**{"callback_manager": manager, **kwargs})
        said = "is no retriever; give one, as index.as_retriever()"
        self._retriever, self._reorder = checked(retriever, BaseRetriever, said), reorder

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._known(self._retriever.retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        return await asyncio.to_thread(self._known, nodes)

    def _known(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        self._reader.expect(nodes)
        return self._reader.ordered(nodes) if self._reorder else nodes

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {"retriever": self._retriever}


class CachedPostprocessor(BaseNodePostprocessor):
    """Returns nodes as they come, and sees that the model can reuse them.

    It does for nodes what `CachedRetriever` does, behind postprocessors that give them other texts
    or bring further nodes. Put it last.

    Example:
        window = MetadataReplacementPostProcessor("window")
        index.as_query_engine(node_postprocessors=[window, CachedPostprocessor(llm)])
    """

    _reader: Reader = PrivateAttr()

    def __init__(
        self,
        llm: LLM,
        *,
        encode: Encode = "background",
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
    ) -> None:
        """Say who reads the nodes.

        Args:
            encode: what happens to nodes that have no KV; see `cached_rag.spi.Learner`.
            prompt, variable: the template nodes go to, for "eager"; see `CachedRAGLLM.encode`.

        Raises:
            cached_rag.ConfigError: `llm` is of another kind, there is no such `encode`, or `prompt`
                is no template.
        """
        super().__init__()
        self._reader = Reader(unwrapped(llm), encode, {"prompt": prompt, "variable": variable})

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._reader.expect(nodes)
        return nodes
