"""An LLM over `cached_rag.Engine`: chat and completion, modules found on the way.

Uses public names of `cached_rag` only; knows no tensor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from cached_rag import CachedRAG, Engine, GenerationConfig, StoreConfig, Stream

_LOADING = threading.Lock()


class CachedRAGLLM(CustomLLM):
    """A local model that does not prefill text again whose KV it holds.

    Whatever an engine (or a `CachedRAG` index) has encoded is found in any prompt by its text, so
    query engines and templates stay as they are.

    Example:
        llm = CachedRAGLLM(model="smollm2-135m", store="kv")
        llm.encode(node.get_content(MetadataMode.LLM) for node in nodes)
        index.as_query_engine(llm=llm).query("...")
    """

    model: str = Field(default="smollm2-135m", description="Alias, hub id, folder or GGUF file.")
    store: str | None = Field(default=None, description="Folder for KV; None keeps it in memory.")
    method: str = Field(default="auto", description="How cached KV is used.")
    recompute_ratio: float | None = Field(default=None, description="Share to recompute.")
    temperature: float = Field(default=0.0, description="0 decodes greedily.")
    max_tokens: int = Field(default=256, description="Most tokens of an answer.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    _engine: Engine | CachedRAG | None = PrivateAttr(default=None)

    def __init__(self, *, engine: Engine | CachedRAG | None = None, **data: Any) -> None:
        """Settings are fields; `engine` is one to share (or a `CachedRAG`) instead of loading."""
        if isinstance(engine, Engine):
            data.setdefault("model", engine.model.name)
        super().__init__(**data)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedRAGLLM"

    def loaded_engine(self) -> Engine:
        """The engine, loaded on first use."""
        with _LOADING:
            if self._engine is None:
                self._engine = Engine.load(self.model, store=StoreConfig(path=self.store))
        return self._engine.engine if isinstance(self._engine, CachedRAG) else self._engine

    def encode(self, texts: Any, prefix: Any = None) -> Any:
        """Prefill texts once; see `Engine.encode`."""
        return self.loaded_engine().encode(list(texts), prefix=prefix)

    @property
    def metadata(self) -> LLMMetadata:
        """The model's own limits."""
        loaded = self.loaded_engine().model
        return LLMMetadata(
            context_window=loaded.context_length,
            num_output=self.max_tokens,
            is_chat_model=bool(getattr(loaded.tokenizer, "chat_template", None)),
            model_name=self.model,
        )

    def _stream(self, prompt: Any, options: dict[str, Any]) -> Stream:
        config = GenerationConfig(
            method=self.method,
            recompute_ratio=self.recompute_ratio,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )
        return self.loaded_engine().stream(prompt, config.replace(**options))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """One answer to chat messages."""
        stream = self._stream(_plain(messages), kwargs)
        message = ChatMessage(role=MessageRole.ASSISTANT, content="".join(stream))
        return ChatResponse(message=message, raw=stream.report.to_dict())

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """An answer piece by piece."""
        stream = self._stream(_plain(messages), kwargs)

        def pieces() -> ChatResponseGen:
            text = ""
            for piece in stream:
                text += piece
                message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
                yield ChatResponse(message=message, delta=piece, raw=stream.report.to_dict())

        return pieces()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """One answer to a string; put in a user's message unless it is formatted already."""
        stream = self._stream(self._prompt(prompt, formatted), kwargs)
        return CompletionResponse(text="".join(stream), raw=stream.report.to_dict())

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """An answer to a string, piece by piece."""
        stream = self._stream(self._prompt(prompt, formatted), kwargs)

        def pieces() -> CompletionResponseGen:
            text = ""
            for piece in stream:
                text += piece
                yield CompletionResponse(text=text, delta=piece, raw=stream.report.to_dict())

        return pieces()

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, off the event loop."""
        return await asyncio.to_thread(self.chat, messages, **kwargs)

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`, off the event loop."""
        return await asyncio.to_thread(self.complete, prompt, formatted, **kwargs)

    def _prompt(self, prompt: str, formatted: bool) -> Any:
        if formatted or not self.metadata.is_chat_model:
            return prompt
        return [{"role": "user", "content": prompt}]


_ROLES = {"tool": "user", "function": "user", "chatbot": "assistant", "developer": "system"}


def _plain(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as roles and strings."""
    return [
        {
            "role": _ROLES.get(message.role.value, message.role.value),
            "content": message.content or "",
        }
        for message in messages
    ]
