"""A retriever around any other, that makes a model know what comes out of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from langchain_core import callbacks, runnables
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import RunnableConfigurableFields
from pydantic import BeforeValidator, ConfigDict, InstanceOf

from cached_rag.spi import Encode, Learner, Progress, checked
from langchain_cached_rag.settings import EngineSettings, unwrapped


def _retriever(given: Any) -> Any:
    return checked(given, runnables.Runnable, "is no retriever; give one, as store.as_retriever()")


class CachedRetriever(BaseRetriever):
    """Returns what the retriever inside returns, and sees that the model can reuse it.

    Put it inside of what has a language model rewrite the documents, as `LLMChainExtractor` does:
    that differs with every question, so its KV would never be used again.

    Example:
        documents = CachedRetriever(retriever=store.as_retriever(), llm=llm)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: Annotated[RetrieverLike, BeforeValidator(_retriever)]
    """Any retriever, or a chain that returns documents; further arguments of `invoke` are passed
    on to it."""
    llm: Annotated[EngineSettings, BeforeValidator(unwrapped)]
    """The `ChatCachedRAG` or `CachedRAGLLM` that will read the documents, or what was made of it
    by `bind`, `with_retry`, `with_structured_output` and the like."""
    encode: Encode = "background"
    """What happens to documents that have no KV: "eager" prefills them before they are returned,
    "background" after the first answer that used them, "off" leaves them alone."""
    prompt: InstanceOf[BasePromptTemplate[Any]] | None = None
    """The chain's prompt, for "eager": see `EngineSettings.encode`."""
    variable: str = "context"
    """The prompt's variable that the documents go to."""
    k: int | None = None
    """Most documents to return; None leaves that to the retriever inside. What takes no k, as a
    chain that begins with a function, is not given it, and what it returns is cut."""
    reorder: bool = False
    """Return the documents in an order in which an earlier prompt began with them, so that its KV
    is reused without loss; those that continue none come behind, in the retriever's order."""
    progress: Progress = None
    """How "eager" shows how far it is; see `cached_rag.encode_progress`."""

    def invoke(
        self, input: str, config: runnables.RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `BaseRetriever.invoke`; the retriever inside gets all of the configuration."""
        return super().invoke(input, config, **kwargs, outer=runnables.ensure_config(config))

    async def ainvoke(
        self, input: str, config: runnables.RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `invoke`."""
        return await super().ainvoke(input, config, **kwargs, outer=runnables.ensure_config(config))

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: callbacks.CallbackManagerForRetrieverRun,
        outer: runnables.RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config = runnables.patch_config(outer, callbacks=run_manager.get_child())
        return self._known(self.retriever.invoke(query, config, **kwargs), k)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: callbacks.AsyncCallbackManagerForRetrieverRun,
        outer: runnables.RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config = runnables.patch_config(outer, callbacks=run_manager.get_child())
        found = await self.retriever.ainvoke(query, config, **kwargs)
        return await asyncio.to_thread(self._known, found, k)

    def _arguments(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """What the retriever inside is given; and how many documents it may return."""
        k = kwargs.pop("k", self.k)
        if k is not None and takes(self.retriever, "k"):
            kwargs["k"] = k
        return kwargs, k

    def _known(self, found: Any, k: int | None) -> list[Document]:
        """The first k documents, in the order wanted, of which the model is told."""
        said = "is what the retriever returned; have it return a list of Documents"
        documents = [checked(one, Document, said) for one in checked(found, Sequence, said)][:k]
        texts = [document.page_content for document in documents]
        options = {"prompt": self.prompt, "variable": self.variable, "progress": self.progress}
        Learner(self.llm, self.encode, options).learn(texts)
        self.llm.prefetch(texts)
        return [documents[at] for at in self.llm.order(texts)] if self.reorder else documents


def takes(runnable: Any, argument: str) -> bool:
    """Whether a retriever, or what was made of retrievers, can be called with an argument.

    Of a chain the first step gets it, of fallbacks each. Where that is not known, it is not so.
    """
    if isinstance(runnable, BaseRetriever):
        return _accepts(runnable._get_relevant_documents, argument)
    if isinstance(runnable, runnables.RunnableLambda):
        return _accepts(getattr(runnable, "func", None) or runnable.afunc, argument)
    if isinstance(runnable, runnables.RunnableSequence):
        return takes(runnable.first, argument)
    if isinstance(runnable, RunnableBindingBase):
        return takes(runnable.bound, argument)
    if isinstance(runnable, RunnableConfigurableFields):
        return takes(runnable.default, argument)
    if isinstance(runnable, runnables.RunnableWithFallbacks):
        return all(takes(one, argument) for one in runnable.runnables)
    return False


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some of Python's own functions have none
        return False
    rest = inspect.Parameter.VAR_KEYWORD
    return any(one.name == argument or one.kind is rest for one in parameters)
