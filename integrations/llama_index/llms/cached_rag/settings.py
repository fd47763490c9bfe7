"""What an LLM is loaded by and answers with, and the engine behind it.

Uses public names of `cached_rag` only; knows no message and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, SecretStr

from cached_rag import (
    DEFAULT_MODEL,
    CachedRAG,
    Engine,
    GenerationConfig,
    StoreConfig,
)

_GENERATION = (
    *("method", "recompute_ratio", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "drafts"),
)


class EngineSettings(BaseModel):
    """Settings of a model and its store, and of answers. Nothing is loaded before it is needed."""

    model: str = Field(default=DEFAULT_MODEL, description="Alias, hub id, folder or GGUF file.")
    store: str | None = Field(default=None, description="Folder for KV; None keeps it in memory.")
    remote: str | None = Field(
        default=None,
        repr=False,
        description="A KV store that several machines share, such as redis://host:6379/0.",
    )
    signing_key: SecretStr | None = Field(
        default=None, description="KV on disk and there that is not signed with it is not used."
    )
    sequence_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Most bytes of KV of finished prompts, kept for their chats' next turns; 0: "
        "none; None: a quarter of what chunks may have in memory.",
    )
    namespace: str = Field(default="", description="Tenants never share KV.")
    dtype: str | None = Field(default=None, description="None: the fastest this machine has.")
    device: str | None = Field(default=None, description="None: the best this machine has.")
    weights: str = Field(default="as stored", description="as stored, bf16, int8 or int4.")
    backend: str = Field(default="transformers", description="Or llama.cpp, which runs a GGUF.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    adapter: str | None = Field(default=None, description="Folder or hub id of a LoRA adapter.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further options of the model's from_pretrained."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="For the chat template, such as enable_thinking=False."
    )
    context_window: int | None = Field(default=None, description="Less than the model's own.")
    method: str = Field(default="auto", description="How cached KV is used.")
    recompute_ratio: float | None = Field(default=None, description="Share to recompute.")
    temperature: float = Field(default=0.0, description="0 decodes greedily.")
    top_p: float = Field(default=1.0, description="Nucleus sampling.")
    top_k: int = Field(default=0, description="Top-k sampling; 0 for none.")
    max_tokens: int = Field(default=256, description="Most tokens of an answer.")
    stop: list[str] | None = Field(default=None, description="Strings that end the answer.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    repetition_penalty: float | None = Field(default=None, description="None: the model's own.")
    presence_penalty: float = Field(default=0.0, description="-2 to 2, as OpenAI's.")
    frequency_penalty: float = Field(default=0.0, description="-2 to 2, as OpenAI's.")
    drafts: bool = Field(default=True, description="Several tokens a pass where answers copy.")
    _engine: Engine | CachedRAG | None = PrivateAttr(default=None)

    def loaded_engine(self) -> Engine:
        """The engine, loaded on first use.

        Raises:
            ModelNotFoundError, ModelError: see `cached_rag.load_model`.
        """
        if isinstance(self._engine, CachedRAG):
            return self._engine.engine
        if self._engine is None:
            store = StoreConfig(
                path=self.store,
                remote=self.remote,
                signing_key=self.signing_key.get_secret_value() if self.signing_key else None,
                namespace=self.namespace,
                sequence_bytes=self.sequence_bytes,
            )
            self._engine = Engine.shared(
                self.model,
                store=store,
                dtype=self.dtype,
                device=self.device,
                weights=self.weights,
                backend=self.backend,
                revision=self.revision,
                adapter=self.adapter,
                model_kwargs=self.model_kwargs,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        return self._engine

    def _config(self, options: dict[str, Any]) -> GenerationConfig:
        settings = {name: getattr(self, name) for name in _GENERATION}
        settings["stop"] = tuple(self.stop or ())
        return GenerationConfig(**settings).replace(**options)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text: what `Settings.tokenizer` wants, so that limits are the model's."""
        return self.loaded_engine().tokenization.literal(text).ids

    def register(self, texts: Iterable[str]) -> None:
        """Know texts as chunks: those that prompts contain are encoded after the answers."""
        self.loaded_engine().register(list(texts))

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring texts' KV into memory."""
        self.loaded_engine().prefetch(list(texts))

    def forget(self, texts: Iterable[str]) -> None:
        """Drop texts and their KV."""
        self.loaded_engine().forget(list(texts))
