"""A retriever around any other, that makes a model know what comes out of it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, InstanceOf

from langchain_cached_rag.settings import Encode, EngineSettings


class CachedRetriever(BaseRetriever):
    """Returns what the retriever inside returns, and sees that the model can reuse it.

    Example:
        documents = CachedRetriever(retriever=store.as_retriever(), llm=llm)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: BaseRetriever
    """Any retriever; further arguments of `invoke` are passed on to it."""
    llm: EngineSettings
    """The `ChatCachedRAG` or `CachedRAGLLM` that will read the documents."""
    encode: Encode = "background"
    """What happens to documents that have no KV: "eager" prefills them before they are returned,
    "background" after the first answer that used them, "off" leaves them alone."""
    prompt: InstanceOf[BasePromptTemplate[Any]] | None = None
    """The chain's prompt, for "eager": see `EngineSettings.encode`."""
    variable: str = "context"
    """The prompt's variable that the documents go to."""
    k: int | None = None
    """Most documents to return; None leaves that to the retriever inside."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config: Any = {"callbacks": run_manager.get_child()}
        documents = self.retriever.invoke(query, config, **kwargs)[:k]
        self._know(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config: Any = {"callbacks": run_manager.get_child()}
        documents = (await self.retriever.ainvoke(query, config, **kwargs))[:k]
        await asyncio.to_thread(self._know, documents)
        return documents

    def _arguments(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """What the retriever inside is given; and how many documents it may return."""
        if self.k is not None:
            kwargs = {"k": self.k, **kwargs}
        return kwargs, kwargs.get("k")

    def _know(self, documents: list[Document]) -> None:
        texts = [document.page_content for document in documents]
        self.llm.learn(texts, self.encode, prompt=self.prompt, variable=self.variable)
        self.llm.prefetch(texts)
