"""What the chat model and the string model have in common: settings, and an engine behind them.

Uses public names of `cached_rag` only; knows no message and no tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from langchain_core.prompts import BasePromptTemplate
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from cached_rag import (
    DEFAULT_MODEL,
    CachedRAG,
    EncodeSummary,
    Engine,
    GenerationConfig,
    Progress,
    StoreConfig,
    encode_progress,
    template_head,
)
from langchain_cached_rag.messages import Prompt, filled

# Settings that a model is loaded by, those that its store has, too; and settings of hosted models
# that applications pass to any model: a local one has no use for them.
_LOADING = (
    *("dtype", "device", "weights", "backend", "revision", "adapter"),
    *("model_kwargs", "chat_template_kwargs"),
)
_OWN = ("store", "namespace", *_LOADING)
_REMOTE = frozenset({"api_key", "base_url", "timeout", "max_retries"})
GENERATION_SETTINGS = (
    *("method", "recompute_ratio", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "drafts"),
)


class EngineSettings(BaseModel):
    """Settings of a model and its store. Objects with the same settings share one engine.

    Nothing is loaded before it is needed.
    """

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
    """How cached KV is used; see `cached_rag.METHODS`."""
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
    _engines: dict[str, Engine] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_only(cls, values: Any) -> Any:
        """Refuse what is misspelt; drop what only hosted models have."""
        if not isinstance(values, dict):
            return values
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        unknown = values.keys() - cls.model_fields.keys() - aliases - _REMOTE
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}; known: {list(cls.model_fields)}")
        return {name: value for name, value in values.items() if name not in _REMOTE}

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _check_generation(self) -> EngineSettings:
        self._config(None, {})
        return self

    def model_post_init(self, context: Any, /) -> None:
        """Versions appear in traces, where langchain-core collects them.

        Written out, because pydantic's own for private attributes does not call LangChain's.
        """
        super().model_post_init(context)
        if hasattr(self, "_add_version"):
            self._add_version("cached-rag", version("cached-rag"))

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on, so that response caches never mix settings."""
        settings = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        # LangChain overwrites "stop" with the call's.
        settings["default_stop"] = settings.pop("stop")
        if self.engine is not None:
            loaded, namespace = self.loaded_engine().model, self.loaded_engine().library.namespace
            given = {"model": loaded.name, "fingerprint": loaded.fingerprint}
            return {**given, "namespace": namespace, **settings}
        own = {name: getattr(self, name) for name in _OWN}
        return {"model": self.model_name, **own, **settings}

    @property
    def engine_key(self) -> tuple[object, ...]:
        """Models with the same key have the same engine."""
        if self.engine is not None:
            return (id(self.engine),)
        far = (self.remote, self.signing_key)  # a SecretStr as text would be any other
        return (self.model_name, self.sequence_bytes, *far, *(str(getattr(self, n)) for n in _OWN))

    @property
    def _model(self) -> str:
        """The model's name as users see it."""
        if isinstance(self.engine, CachedRAG):
            return self.engine.settings["model"]
        return self.engine.model.name if self.engine is not None else self.model_name

    # The engine ------------------------------------------------------------------------------

    def loaded_engine(self, model: str | None = None) -> Engine:
        """The engine, loaded on first use; with `model`, one of another model instead.

        Raises:
            ModelNotFoundError, ModelError: see `cached_rag.load_model`.
        """
        if model is not None and model != self._model:
            return self._shared(model)
        if isinstance(self.engine, CachedRAG):
            return self.engine.engine
        if self.engine is not None:
            return self.engine
        return self._shared(self.model_name)

    def renamed(self, model: str | None) -> EngineSettings:
        """These settings with another model, as a call with `model=` has it; None for the same."""
        if model is None or model == self._model:
            return self
        return self.model_copy(update={"model_name": model, "engine": None})

    def _shared(self, model: str) -> Engine:
        if model not in self._engines:  # held, for the process forgets what nobody holds
            store = StoreConfig(
                path=self.store,
                remote=self.remote,
                signing_key=self.signing_key.get_secret_value() if self.signing_key else None,
                namespace=self.namespace,
                sequence_bytes=self.sequence_bytes,
            )
            options: Any = {name: getattr(self, name) for name in _LOADING}
            self._engines[model] = Engine.shared(model, store=store, **options)
        return self._engines[model]

    def _config(
        self, stop: str | Sequence[str] | None, options: dict[str, Any]
    ) -> GenerationConfig:
        """Settings of one call: the object's, and what was bound or given to the call.

        `stop` is typed as a list by LangChain, which passes on what it is given: a string, too.

        LangChain's own option "stream" says how the call is made, not what it computes.
        """
        settings = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        settings["stop"] = stop or self.stop or ()
        options = {name: value for name, value in options.items() if name != "stream"}
        if "top_logprobs" in options or isinstance(options.get("logprobs"), bool):
            wanted, top = options.pop("logprobs", True), options.pop("top_logprobs", None)
            options["logprobs"] = (top or 0) if wanted else None
        return GenerationConfig(**settings).replace(**options)

    # Chunks ----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str],
        *,
        prompt: BasePromptTemplate[Any] | None = None,
        variable: str = "context",
        progress: Progress = None,
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; what is there already costs nothing.

        Args:
            prompt: the template they will be used in. What it says before `variable` is then
                reused without loss, and the texts are encoded behind it. Without it, that is
                learned from use.
            progress: True for a bar on standard error, None for one if that is a terminal, False
                for none; or a function that is called with the numbers of tokens done and to do.

        Raises:
            ValueError: the prompt has no such variable, or another one stands before it.
            cached_rag.ContextOverflowError: a text exceeds the model's context.
            cached_rag.StoreFullError: no room left; what was encoded before is kept.
        """
        engine = self.loaded_engine()
        head = None
        if prompt is not None:
            head = template_head(
                engine,
                prompt.input_variables,
                variable,
                lambda values: self._prompt(filled(prompt, values)),
            )
        with encode_progress(progress) as shown:
            return engine.encode(list(texts), head, context="configured", **shown)

    def register(self, texts: Iterable[str]) -> None:
        """Know texts as chunks: those that prompts contain are encoded after the answers."""
        self.loaded_engine().register(list(texts))

    def prefetch(self, texts: Iterable[str], *, in_parts: bool = False) -> None:
        """Begin to bring texts' KV into memory; see `cached_rag.Engine.prefetch`."""
        self.loaded_engine().prefetch(list(texts), in_parts=in_parts)

    def forget(self, texts: Iterable[str]) -> None:
        """Drop texts and their KV."""
        self.loaded_engine().forget(list(texts))

    @abstractmethod
    def _prompt(self, value: Any) -> Prompt:
        """A LangChain prompt value as the engine takes it."""

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        return self.loaded_engine().tokenization.literal(text).ids
