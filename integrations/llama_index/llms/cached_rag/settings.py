"""What an LLM is loaded by and answers with, and the engine behind it.

Uses public names of `cached_rag` only; knows no message and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    SecretStr,
    create_model,
    field_serializer,
    field_validator,
)

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.spi import DEFAULT_MODEL, parted, settings_of

# What only a call can ask for.
_OF_A_CALL = ("check_layer", "gradual", "adaptive", "ignore_eos", "logprobs", "grammar")
_ANSWERS = settings_of(GenerationConfig)
_GENERATION = tuple(name for name in _ANSWERS if name not in _OF_A_CALL)
# What an engine is loaded with, besides its model and its store's folder.
_LOADED_WITH = settings_of(ModelConfig, StoreConfig)
_LOADING = tuple(name for name in _LOADED_WITH if name != "path")
_OWN = ("model", "store", *_LOADING)
# Options of a call that say how a hosted model is reached: a local one has no use for them.
_REMOTE = frozenset({"extra_headers", "extra_query", "timeout"})
_NEVER_NONE = {name for name, one in _ANSWERS.items() if one.default is not None}
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


if TYPE_CHECKING:

    class Settings(BaseModel):
        """Its fields are made below."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Settings = create_model(
        "Settings",
        **{
            name: (one.type, Field(one.default, description=one.help, repr=name != "remote"))
            for name, one in (_LOADED_WITH | _ANSWERS).items()
            if name in (*_LOADING, *_GENERATION)
        },
    )


class EngineSettings(Settings):
    """Settings of a model and its store, and of answers. Nothing is loaded before it is needed.

    Besides those that stand here, the fields are the settings of `ModelConfig` and `StoreConfig`,
    and of `GenerationConfig` all that a whole application can want.
    """

    model: str = Field(default=DEFAULT_MODEL, description="Alias, hub id, folder or GGUF file.")
    store: str | None = Field(default=None, description="Folder for KV; None keeps it in memory.")
    signing_key: SecretStr | None = Field(
        default=None, description="KV on disk and there that is not signed with it is not used."
    )
    context_window: int | None = Field(default=None, description="Less than the model's own.")
    stop: list[str] | None = Field(default=None, description="Strings that end the answer.")
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
        store, options = self.loaded_with()
        return Engine.shared(self.model, store=store, **options)

    def loaded_with(self) -> tuple[StoreConfig, dict[str, Any]]:
        """A store's settings, and the other options of `Engine.load`.

        Raises:
            ConfigError: one of them is none.
        """
        own = {name: getattr(self, name) for name in _LOADING}
        own["signing_key"] = self.signing_key and self.signing_key.get_secret_value()
        model, store = parted(own, ModelConfig, StoreConfig)
        return StoreConfig(path=self.store, **store), model

    def changed_settings(self) -> list[str]:
        """Of what an engine is loaded with, the names of all that are not the default."""
        own = [n for n in _LOADING if getattr(self, n) != _LOADED_WITH[n].default]
        return own if self.store is None else ["store", *own]

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
