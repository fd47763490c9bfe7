"""What an LLM is loaded by and answers with, and the engine behind it.

Uses public names of `cached_rag` only; knows no message and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from llama_index.core.bridge.pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    SecretStr,
    field_serializer,
    field_validator,
)

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.spi import DEFAULT_MODEL

# Settings that an engine is loaded with, and those by which it is another engine.
_LOADING = (
    *("dtype", "device", "weights", "backend", "revision", "adapter"),
    *("model_kwargs", "chat_template_kwargs"),
)
_OWN = ("model", "store", "remote", "signing_key", "sequence_bytes", "namespace", *_LOADING)
_GENERATION = (
    *("method", "quality", "recompute_ratio", "temperature", "top_p", "top_k", "max_tokens"),
    *("stop", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "drafts"),
)
# Options of a call that say how a hosted model is reached: a local one has no use for them.
_REMOTE = frozenset({"extra_headers", "extra_query", "timeout"})
_NEVER_NONE = {one.name for one in fields(GenerationConfig) if one.default is not None}
_HIDDEN = "**********"


@dataclass(frozen=True)
class _Held:
    """An engine, and the settings that it goes with.

    Attributes:
        is_given: it came with these settings, and was not loaded by them.
    """

    engine: Engine | CachedRAG
    settings: tuple[object, ...]
    is_given: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        """Itself: copies of an LLM share its engine, which cannot be copied."""
        return self


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
    quality: str | None = Field(default=None, description="Instead: exact, auto or fast.")
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
    _held: _Held | None = PrivateAttr(default=None)

    @field_serializer("signing_key")
    def _hide(self, key: SecretStr | None) -> str | None:
        return None if key is None else _HIDDEN

    @field_validator("signing_key")
    @classmethod
    def _is_no_mask(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and key.get_secret_value() == _HIDDEN:
            raise ValueError(
                "settings are saved without their signing key, which is a secret; give it again: "
                "from_dict(settings, signing_key=...)"
            )
        return key

    def loaded_engine(self) -> Engine:
        """The engine, loaded on first use, and anew where a copy has other settings.

        Raises:
            ModelNotFoundError, ModelError: see `cached_rag.load_model`.
            ConfigError: settings were changed of an engine that was given, or it came with a
                namespace that is not its own.
        """
        now, held = self._own_settings(), self._held
        if held is None or held.settings != now:
            if held is not None and held.is_given:
                changed = [n for n, a, b in zip(_OWN, held.settings, now, strict=True) if a != b]
                raise ConfigError(
                    f"{', '.join(changed)} changed, and an engine that was given has settings of "
                    "its own; give another one (engine=...), or leave engine= out"
                )
            held = self._held = _Held(self._shared(), now)
        engine = held.engine.engine if isinstance(held.engine, CachedRAG) else held.engine
        theirs = engine.library.namespace
        if self.namespace not in ("", theirs):  # a given one's: a CachedRAG's is known only now
            raise ConfigError(
                f"namespace={self.namespace!r} was set, and the engine that was given keeps KV of "
                f"{theirs!r}; give engine.tenant({self.namespace!r}) as the engine, or leave "
                "engine= out"
            )
        return engine

    def _give(self, engine: Engine | CachedRAG) -> None:
        self._held = _Held(engine, self._own_settings(), is_given=True)

    def _own_settings(self) -> tuple[object, ...]:
        found = (getattr(self, name) for name in _OWN)
        return tuple(repr(value) if isinstance(value, dict) else value for value in found)

    def _shared(self) -> Engine:
        store = StoreConfig(
            path=self.store,
            remote=self.remote,
            signing_key=self.signing_key.get_secret_value() if self.signing_key else None,
            namespace=self.namespace,
            sequence_bytes=self.sequence_bytes,
        )
        options: Any = {name: getattr(self, name) for name in _LOADING}
        return Engine.shared(self.model, store=store, **options)

    def _config(self, options: dict[str, Any]) -> GenerationConfig:
        settings = {name: getattr(self, name) for name in _GENERATION}
        settings["stop"] = tuple(self.stop or ())
        # None changes nothing, unless it is a value of that setting.
        asked = {
            name: value
            for name, value in options.items()
            if name not in _REMOTE and (value is not None or name not in _NEVER_NONE)
        }
        return GenerationConfig(**settings).replace(**asked)

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
