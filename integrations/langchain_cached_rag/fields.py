"""The settings of both models, as fields, and what of them is one call's. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    create_model,
    field_validator,
    model_validator,
)

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.spi import DEFAULT_MODEL, parted, settings_of, unknown_settings

if TYPE_CHECKING:
    from typing_extensions import Self

# Settings of hosted models that applications pass to any model, when it is made and when it is
# called: a local one has no use for them.
_REMOTE = frozenset({"api_key", "base_url", "timeout", "max_retries"})
_REMOTE_CALL = frozenset({"extra_headers", "extra_query", "timeout"})
# What only a call can ask for.
_OF_A_CALL = ("check_layer", "gradual", "adaptive", "ignore_eos", "logprobs", "grammar")
_ANSWERS = settings_of(GenerationConfig)
CALL_SETTINGS = {*_ANSWERS, "top_logprobs"} - {*_ANSWERS.keys() - {*_OF_A_CALL}}
GENERATION_SETTINGS = tuple(name for name in _ANSWERS if name not in _OF_A_CALL)
_NEVER_NONE = {name for name, one in _ANSWERS.items() if one.default is not None}
# What an engine is loaded with, besides its model and its store's folder.
_LOADED_WITH = settings_of(ModelConfig, StoreConfig)
LOADING_SETTINGS = tuple(name for name in _LOADED_WITH if name != "path")


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
            if name in (*LOADING_SETTINGS, *GENERATION_SETTINGS)
        },
    )


class Fields(Settings):
    """Settings of a model, of its store, and of its answers.

    Besides those that stand here, the fields are the settings of `ModelConfig` and `StoreConfig`,
    and of `GenerationConfig` all that a whole application can want.
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, alias="model")
    """Alias, hub id, folder or GGUF file."""
    store: str | None = None
    """Folder for KV; None keeps it in memory."""
    signing_key: SecretStr | None = None
    """KV on disk and in a remote store that is not signed with it is not used."""
    engine: Engine | CachedRAG | None = Field(default=None, exclude=True, repr=False)
    """One to share, instead of `model`, `store` and what they are loaded with."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer; they are not part of it."""

    @model_validator(mode="before")
    @classmethod
    def _known_only(cls, values: Any) -> Any:
        """Refuse what is misspelt; drop what only hosted models have."""
        if not isinstance(values, dict):
            return values
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        unknown = values.keys() - cls.model_fields.keys() - aliases - _REMOTE
        if unknown:
            raise ConfigError(unknown_settings(sorted(unknown), cls.model_fields))
        return {name: value for name, value in values.items() if name not in _REMOTE}

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._config(None, {})
        self._loaded_with()
        given = {n for n in self.changed_settings() if n != "namespace"}  # see `loaded_engine`
        if self.engine is not None and given:
            raise ConfigError(
                f"{', '.join(sorted(given))}: the engine that was given is loaded, and has a store "
                "of its own; give these to Engine.load, or leave engine= out"
            )
        return self

    def changed_settings(self) -> dict[str, Any]:
        """Of what an engine is loaded with, all that is not the default."""
        own = {name: getattr(self, name) for name in LOADING_SETTINGS}
        changed = {n: value for n, value in own.items() if value != _LOADED_WITH[n].default}
        return changed if self.store is None else {"store": self.store, **changed}

    def _loaded_with(self) -> tuple[StoreConfig, dict[str, Any]]:
        """A store's settings, and the other options of `Engine.load`."""
        own = {name: getattr(self, name) for name in LOADING_SETTINGS}
        own["signing_key"] = self.signing_key and self.signing_key.get_secret_value()
        model, store = parted(own, ModelConfig, StoreConfig)
        return StoreConfig(path=self.store, **store), model

    def _config(
        self, stop: str | Sequence[str] | None, options: dict[str, Any]
    ) -> GenerationConfig:
        """Settings of one call: the object's, and what was bound or given to the call.

        `stop` is typed as a list by LangChain, which passes on what it is given: a string, too.

        LangChain's own option "stream" says how the call is made, not what it computes.
        """
        options = asked(options)
        settings = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        settings["stop"] = stop or self.stop or ()
        options.pop("stream", None)
        if "top_logprobs" in options or isinstance(options.get("logprobs"), bool):
            wanted, top = options.pop("logprobs", True), options.pop("top_logprobs", None)
            options["logprobs"] = (top or 0) if wanted else None
        return GenerationConfig(**settings).replace(**options)


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options less those that change nothing: None for a setting that cannot be None."""
    return {
        name: value
        for name, value in options.items()
        if name not in _REMOTE_CALL and (value is not None or name not in _NEVER_NONE)
    }
