"""A retriever around any other, that makes a model know what comes out of it.

Documents come out of an index, or from a model's hand: retrievers that compress with a language
model (`LLMChainExtractor`) return texts that differ with every question. Their KV would never be
used again; that of the documents the model read is.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackHandler,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import (
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableSequence,
    RunnableWithFallbacks,
    ensure_config,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.configurable import DynamicRunnable
from pydantic import BeforeValidator, ConfigDict, InstanceOf

from cached_rag.spi import Encode, Learner, Progress
from langchain_cached_rag.settings import EngineSettings, parts_of, unwrapped


class CachedRetriever(BaseRetriever):
    """Returns what the retriever inside returns, and sees that the model can reuse it.

    What a language model inside made of the documents, as `LLMChainExtractor` does, differs with
    every question and is not kept; the documents it was made of are.

    Example:
        documents = CachedRetriever(retriever=store.as_retriever(), llm=llm)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: RetrieverLike
    """Any retriever, or a chain that returns documents; further arguments of `invoke` are passed
    on to it."""
    llm: Annotated[EngineSettings, BeforeValidator(unwrapped)]
    """The `ChatCachedRAG` or `CachedRAGLLM` that will read the documents, or what was made of it
    by `bind`, `with_retry`, `with_structured_output` and the like."""
    encode: Encode = "background"
    """What happens to documents that have no KV: "eager" prefills them before they are returned,
    "background" after the first answer that used them, "off" leaves them alone."""
    prompt: InstanceOf[BasePromptTemplate[Any]] | None = None
    """The chain's prompt, for "eager": see `EngineSettings.encode`. Documents that a model inside
    reads are encoded without it, as that model has a prompt of its own."""
    variable: str = "context"
    """The prompt's variable that the documents go to."""
    k: int | None = None
    """Most documents to return; None leaves that to the retriever inside. What takes no k, as a
    chain that begins with a function, is not given it, and what it returns is cut."""
    progress: Progress = None
    """How "eager" shows how far it is; see `cached_rag.encode_progress`."""

    def invoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `BaseRetriever.invoke`; the retriever inside gets all of the configuration."""
        return super().invoke(input, config, **kwargs, outer=ensure_config(config))

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `invoke`."""
        return await super().ainvoke(input, config, **kwargs, outer=ensure_config(config))

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        outer: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config, origins = self._listening(run_manager, outer)
        documents = self.retriever.invoke(query, config, **kwargs)[:k]
        self._know(documents, origins)
        return documents

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        outer: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        kwargs, k = self._arguments(kwargs)
        config, origins = self._listening(run_manager, outer)
        documents = (await self.retriever.ainvoke(query, config, **kwargs))[:k]
        await asyncio.to_thread(self._know, documents, origins)
        return documents

    def _arguments(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """What the retriever inside is given; and how many documents it may return."""
        k = kwargs.pop("k", self.k)
        if k is not None and takes(self.retriever, "k"):
            kwargs["k"] = k
        return kwargs, k

    def _listening(
        self,
        run_manager: CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun,
        outer: RunnableConfig | None,
    ) -> tuple[RunnableConfig, Origins]:
        """A configuration for the retriever inside, and what hears where its documents are from."""
        # The models inside do not read them in the chain's prompt.
        origins = Origins(self._learner().learn)
        inside = run_manager.get_child()
        inside.add_handler(origins)
        return patch_config(outer, callbacks=inside), origins

    def _know(self, documents: list[Document], origins: Origins) -> None:
        texts, sources = origins.sort_out([document.page_content for document in documents])
        self._learner(prompt=self.prompt, variable=self.variable).learn(texts)
        self.llm.prefetch(sources, in_parts=True)
        self.llm.prefetch(texts)

    def _learner(self, **options: Any) -> Learner:
        return Learner(self.llm, self.encode, {"progress": self.progress, **options})


class Origins(BaseCallbackHandler):
    """Hears what goes on inside one retrieval, in whatever threads LangChain uses."""

    raise_error = True  # what `learn` raises

    def __init__(self, learn: Callable[[list[str]], object]) -> None:
        """Begin to listen.

        Args:
            learn: called with texts that were retrieved, before a model inside reads them.
        """
        self._learn = learn
        # Also held while texts are learned: a model on another thread, about to read one of them,
        # waits for that. Reentrant, because `sort_out` is asked from inside, too.
        self._lock = threading.RLock()
        self._has_read = False
        self._retrieved: dict[str, None] = {}  # in order, each once
        self._read: dict[str, None] = {}
        self._around: set[UUID | None] = set()  # runs with a retriever inside

    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        """Note what a retriever returned, less what a model inside it wrote."""
        texts = [document.page_content for document in documents]
        with self._lock:
            if run_id in self._around:
                texts = self.sort_out(texts)[0]
            self._retrieved |= dict.fromkeys(map(str.strip, texts))
            self._around.add(parent_run_id)

    def on_chain_end(
        self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        """Note that what is around a chain is around the retrievers in it, too."""
        with self._lock:
            if run_id in self._around:
                self._around.add(parent_run_id)

    def on_llm_start(self, serialized: Any, prompts: list[str], **_: Any) -> None:
        """Note which of the texts so far a model is about to read."""
        self._shown(prompts)

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], **_: Any
    ) -> None:
        """As `on_llm_start`."""
        self._shown(message.text for prompt in messages for message in prompt)

    def _shown(self, prompts: Iterable[str]) -> None:
        shown = list(prompts)
        with self._lock:
            self._has_read |= bool(self._retrieved)
            new = [text for text in self._retrieved if text not in self._read]
            if read := [text for text in new if any(text in prompt for prompt in shown)]:
                self._read |= dict.fromkeys(read)
                self._learn(read)

    def sort_out(self, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Tell texts of an index from texts that a model wrote.

        Returns:
            Those of an index; and, if there were others, what the model that wrote them had read.
        """
        with self._lock:
            if not self._has_read:
                return list(texts), []
            kept = [text for text in texts if text.strip() in self._retrieved]
            return kept, list(self._read) if len(kept) < len(texts) else []


def takes(runnable: Any, argument: str) -> bool:
    """Whether a retriever, or what was made of retrievers, can be called with an argument.

    Of a chain the first step gets it, of alternatives each. Where that is not known, it is not so.
    """
    if isinstance(runnable, BaseRetriever):
        return _accepts(runnable._get_relevant_documents, argument)
    if isinstance(runnable, RunnableLambda):
        return _accepts(getattr(runnable, "func", None) or runnable.afunc, argument)
    if isinstance(runnable, RunnableSequence):
        return takes(runnable.first, argument)
    if isinstance(runnable, RunnableBindingBase):
        return takes(runnable.bound, argument)
    if isinstance(runnable, RunnableWithFallbacks):
        return all(takes(one, argument) for one in runnable.runnables)
    if isinstance(runnable, (RunnableBranch, DynamicRunnable)):
        return all(takes(one, argument) for one in parts_of(runnable))
    return False


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some of Python's own functions have none
        return False
    rest = inspect.Parameter.VAR_KEYWORD
    return any(one.name == argument or one.kind is rest for one in parameters)
