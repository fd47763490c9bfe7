"""A retriever around any other, that makes a model know what comes out of it."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.cached_rag import CachedRAGLLM, module_text

Encode = Literal["eager", "background", "off"]


class CachedRetriever(BaseRetriever):
    """Returns what the retriever inside returns, and sees that the model can reuse it.

    Example:
        retriever = CachedRetriever(index.as_retriever(similarity_top_k=6), llm=llm)
        RetrieverQueryEngine.from_args(retriever, llm=llm)
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: CachedRAGLLM,
        *,
        encode: Encode = "background",
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
        **kwargs: Any,
    ) -> None:
        """Wrap a retriever.

        Args:
            encode: what happens to nodes that have no KV. "eager" prefills them before they are
                returned, "background" after the first answer that used them, "off" leaves them.
            prompt, variable: the template nodes go to, for "eager"; see `CachedRAGLLM.encode`.
            kwargs: `BaseRetriever`'s.

        Raises:
            ValueError: `encode` is none of these.
        """
        if encode not in ("eager", "background", "off"):
            raise ValueError(f"encode is 'eager', 'background' or 'off', not {encode!r}")
        super().__init__(**{"callback_manager": retriever.callback_manager, **kwargs})
        self._retriever, self._llm, self._encode = retriever, llm, encode
        self._prompt, self._variable = prompt, variable

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        self._know(nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        await asyncio.to_thread(self._know, nodes)
        return nodes

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {"retriever": self._retriever}

    def _know(self, nodes: list[NodeWithScore]) -> None:
        """With metadata as synthesis shows it, and without, as chat engines may."""
        shown = [module_text(node.node) for node in nodes]
        bare = [node.node.get_content(MetadataMode.NONE) for node in nodes]
        if self._encode == "eager":
            self._llm.encode(shown, prompt=self._prompt, variable=self._variable)
        if self._encode != "off":
            self._llm.register([*shown, *bare])
        self._llm.prefetch(shown)
