"""The settings of both models, as fields, and what of them is one call's. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig
from cached_rag.spi import DEFAULT_MODEL, unknown_settings

if TYPE_CHECKING:
    from typing_extensions import Self

# Settings of hosted models that applications pass to any model, when it is made and when it is
# called: a local one has no use for them.
_REMOTE = frozenset({"api_key", "base_url", "timeout", "max_retries"})
_REMOTE_CALL = frozenset({"extra_headers", "extra_query", "timeout"})
GENERATION_SETTINGS = (
    *("method", "quality", "recompute_ratio", "temperature", "top_p", "top_k", "max_tokens"),
    *("stop", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "drafts"),
)
_OF_ANSWERS = fields(GenerationConfig)
# What only a call can ask for.
CALL_SETTINGS = {*(one.name for one in _OF_ANSWERS), "top_logprobs"} - {*GENERATION_SETTINGS}
_NEVER_NONE = {one.name for one in _OF_ANSWERS if one.default is not None}


class Fields(BaseModel):
    """Settings of a model, of its store, and of its answers."""

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, alias="model")
    """Alias, hub id, folder or GGUF file."""
    store: str | None = None
    """Folder for KV; None keeps it in memory."""
    remote: str | None = Field(default=None, repr=False)
    """A KV store that several machines share, such as "redis://host:6379/0"; see `StoreConfig`."""
    signing_key: SecretStr | None = None
    """KV on disk and there that is not signed with it is not used."""
    sequence_bytes: int | None = Field(default=None, ge=0)
    """Most bytes of KV of finished prompts, which the next turns of their chats begin with; 0 keeps
    none, None takes a quarter of what chunks may have in memory (`cached_rag.StoreConfig`)."""
    namespace: str = ""
    """Tenants with different namespaces never share KV."""
    dtype: str | None = None
    """What to compute in, e.g. "float32"; None for the fastest this machine has."""
    device: str | None = None
    """"cpu", "cuda", "mps"; None for the best this machine has."""
    weights: str = "as stored"
    """How weights are kept for decoding: "as stored", "bf16", "int8" or "int4"."""
    backend: str = "transformers"
    """What runs the model: "transformers", or "llama.cpp" for a GGUF."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter, merged into the weights when they are loaded."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of `AutoModelForCausalLM.from_pretrained`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is given besides the messages, e.g. {"enable_thinking": False}."""
    engine: Engine | CachedRAG | None = Field(default=None, exclude=True, repr=False)
    """One to share, instead of the settings above."""
    method: str = "auto"
    """How cached KV is used; see `cached_rag.spi.METHODS`."""
    quality: str | None = None
    """The same in a word, instead of a method: "exact", "auto" or "fast"."""
    recompute_ratio: float | None = None
    """Share of the reused tokens to recompute; None for the method's default."""
    temperature: float = 0.0
    """0 decodes greedily."""
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    """Most tokens of an answer."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer; they are not part of it."""
    seed: int | None = None
    """Makes sampling repeatable."""
    repetition_penalty: float | None = None
    """None for the model's own."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer has already; -2 to 2."""
    frequency_penalty: float = 0.0
    """The same, for each time that it has it."""
    drafts: bool = True
    """Check several tokens in one pass where the answer copies; it says the same without."""

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
    def _check_generation(self) -> Self:
        self._config(None, {})
        return self

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
