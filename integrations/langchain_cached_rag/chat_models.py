"""A chat model over `cached_rag.Engine`: messages in, messages out, modules found on the way.

Uses public names of `cached_rag` only; knows no tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr

from cached_rag import CachedRAG, Engine, GenerationConfig, Report, StoreConfig

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "user",
    "function": "user",
}
_LOADING = threading.Lock()


class ChatCachedRAG(BaseChatModel):
    """A local chat model that does not prefill text again whose KV it holds.

    Whatever an engine (or a `CachedRAG` index) has encoded is found in any prompt by its text, so
    chains, templates and retrievers stay as they are.

    Example:
        llm = ChatCachedRAG(model="smollm2-135m", store="kv")
        llm.encode(doc.page_content for doc in docs)
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(default="smollm2-135m", alias="model")
    """Alias, hub id, folder or GGUF file; loaded when first used."""
    store: str | None = None
    """Folder for KV; None keeps it in memory."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An `Engine` (or `CachedRAG`) to share, instead of loading one."""
    method: str = "auto"
    recompute_ratio: float | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: list[str] | None = None
    seed: int | None = None
    streaming: bool = False
    _own_engine: Engine | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "cached-rag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on, so that response caches never mix settings."""
        names = (
            "store",
            "method",
            "recompute_ratio",
            "temperature",
            "top_p",
            "top_k",
            "max_tokens",
            "stop",
            "seed",
        )
        loaded = self.engine.engine if isinstance(self.engine, CachedRAG) else self.engine
        model = loaded.model.name if isinstance(loaded, Engine) else self.model_name
        return {"model": model, **{name: getattr(self, name) for name in names}}

    def loaded_engine(self) -> Engine:
        """The engine, loaded on first use."""
        if isinstance(self.engine, CachedRAG):
            return self.engine.engine
        if isinstance(self.engine, Engine):
            return self.engine
        with _LOADING:
            if self._own_engine is None:
                self._own_engine = Engine.load(self.model_name, store=StoreConfig(path=self.store))
            return self._own_engine

    def encode(self, texts: Any, prefix: Any = None) -> Any:
        """Prefill texts once; see `Engine.encode`."""
        return self.loaded_engine().encode(list(texts), prefix=prefix)

    def _config(self, stop: list[str] | None, options: dict[str, Any]) -> GenerationConfig:
        config = GenerationConfig(
            method=self.method,
            recompute_ratio=self.recompute_ratio,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=tuple(stop or self.stop or ()),
            seed=self.seed,
        )
        return config.replace(**options)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self.loaded_engine().generate(_plain(messages), self._config(stop, kwargs))
        message = AIMessage(
            content=answer.text,
            response_metadata=self._metadata(answer.report, answer.finish_reason),
            usage_metadata=_usage(answer.report),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        stream = self.loaded_engine().stream(_plain(messages), self._config(stop, kwargs))
        try:
            for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.close()
        last = AIMessageChunk(
            content="",
            response_metadata=self._metadata(stream.report, stream.finish_reason),
            usage_metadata=_usage(stream.report),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last)

    def _metadata(self, report: Report, finish_reason: str) -> dict[str, Any]:
        return {
            "model_name": self._identifying_params["model"],
            "finish_reason": finish_reason,
            "cached_rag": report.to_dict(),
        }


def _usage(report: Report) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        total_tokens=report.prompt_tokens + report.output_tokens,
        input_token_details=InputTokenDetails(cache_read=report.cached_tokens),
    )


def _plain(messages: list[BaseMessage]) -> list[dict[str, str]]:
    """Messages as roles and strings; text blocks are joined as LangChain joins them."""
    return [{"role": _role(message), "content": str(message.text)} for message in messages]


def _role(message: BaseMessage) -> str:
    return message.role if isinstance(message, ChatMessage) else _ROLES[message.type]
