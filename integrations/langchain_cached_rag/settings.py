"""What the chat model and the string model have in common: settings, and an engine behind them.

Uses public names of `cached_rag` only; knows no message and no tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from langchain_core.prompts import BasePromptTemplate
from pydantic import PrivateAttr

from cached_rag import CachedRAG, ConfigError, Engine
from cached_rag.spi import EncodeSummary, Progress, encode_progress, template_head
from langchain_cached_rag.fields import GENERATION_SETTINGS, Fields
from langchain_cached_rag.messages import Prompt, filled

if TYPE_CHECKING:
    from typing_extensions import Self

# What says where KV is kept, and nothing of answers.
_SECRET = ("remote", "signing_key")


class _Engines(dict[str, Engine]):
    """Engines by their models' names; no weak reference is possible to a dict itself."""


@dataclass(frozen=True)
class _Loaded:
    """Engines that were loaded, by their models' names, and what they were loaded with.

    Attributes:
        kept: those that objects with the same `engine_key` loaded, for `configurable_fields` makes
            one for each call and drops it. The process forgets engines that nobody holds.
    """

    settings: tuple[object, ...]
    kept: _Engines
    engines: dict[str, Engine] = field(default_factory=dict)


_KEPT: WeakValueDictionary[tuple[object, ...], _Engines] = WeakValueDictionary()


class EngineSettings(Fields):
    """Settings of a model and its store. Objects with the same settings share one engine.

    Nothing is loaded before it is needed.
    """

    _loaded: _Loaded | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Versions appear in traces, where langchain-core collects them.

        Written out, because pydantic's own for private attributes does not call LangChain's.
        """
        super().model_post_init(context)
        self._held()
        if hasattr(self, "_add_version"):
            self._add_version("cached-rag", version("cached-rag"))

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on, so that response caches never mix settings."""
        settings = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        # LangChain overwrites "stop" with the call's.
        settings["default_stop"] = settings.pop("stop")
        if self.engine is not None:
            engine = self.loaded_engine()
            return {
                "model": engine.model.name,
                "fingerprint": engine.model.fingerprint,
                "chat_template_kwargs": engine.tokenization.template.kwargs,
                "namespace": engine.library.namespace,
                **settings,
            }
        own = {n: v for n, v in self.changed_settings().items() if n not in _SECRET}
        return {"model": self.model_name, **own, **settings}

    @property
    def engine_key(self) -> tuple[object, ...]:
        """Models with the same key have the same engine."""
        if self.engine is not None:
            return (id(self.engine),)
        return (self.model_name, *self._loading)

    @property
    def _loading(self) -> tuple[object, ...]:
        """All but the model's name that an engine is loaded with."""
        own = self.changed_settings()
        key = own.pop("signing_key", None)  # which as text would be any other
        return (key, *((name, repr(value)) for name, value in own.items()))

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
            ConfigError: an engine was given, and a namespace that is not its own.
        """
        if model is not None and model != self._model:
            return self._shared(model)
        if self.engine is None:
            return self._shared(self.model_name)
        given = self.engine.engine if isinstance(self.engine, CachedRAG) else self.engine
        theirs = given.library.namespace
        if self.namespace not in ("", theirs):
            raise ConfigError(
                f"namespace={self.namespace!r} was set, and the engine that was given keeps KV of "
                f"{theirs!r}; give engine.tenant({self.namespace!r}) as the engine, or leave "
                "engine= out"
            )
        return given

    def renamed(self, model: str | None) -> EngineSettings:
        """These settings with another model, as a call with `model=` has it; None for the same."""
        if model is None or model == self._model:
            return self
        return self.model_copy(update={"model_name": model, "engine": None})

    def _shared(self, model: str) -> Engine:
        loaded = self._held()
        if model not in loaded.engines:
            store, options = self._loaded_with()
            engine = Engine.shared(model, store=store, **options)
            loaded.engines[model] = loaded.kept[model] = engine
        return loaded.engines[model]

    def _held(self) -> _Loaded:
        """Engines loaded with the settings as they are now.

        Copies hold them together as long as they have these settings.
        """
        settings = self._loading
        if self._loaded is None or self._loaded.settings != settings:
            self._loaded = _Loaded(settings, _KEPT.setdefault(self.engine_key, _Engines()))
        return self._loaded

    def __copy__(self) -> Self:
        """A copy that has the same engines, also those that either of the two loads later."""
        self._held()
        return super().__copy__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy of everything but the engines, which are shared: they cannot be copied."""
        self._held()
        memo = {} if memo is None else memo
        memo |= {id(one): one for one in (self.engine, self._loaded)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """For pickling: the settings, by which whoever unpickles them loads an engine.

        Raises:
            ConfigError: an engine was given.
        """
        if self.engine is not None:
            raise ConfigError(
                "a model with an engine that was given cannot be pickled, as no engine can; give "
                "it model=, store= and the like, with which each process loads its own"
            )
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**state["__pydantic_private__"], "_loaded": None}}

    # Chunks ----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str | Sequence[str]],
        *,
        prompt: BasePromptTemplate[Any] | None = None,
        variable: str = "context",
        progress: Progress = None,
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; what is there already costs nothing.

        Args:
            texts: a list among them has the chunks of one document in their order; see
                `cached_rag.Engine.encode`.
            prompt: the template they will be used in. What it says before `variable` is then
                reused without loss, and the texts are encoded behind it. Without it, that is
                learned from use.
            progress: True for a bar on standard error, None for one if that is a terminal, False
                for none; or a function that is called with the numbers of tokens done and to do.

        Raises:
            ValueError: the prompt has no such variable, or another one stands before it.
            cached_rag.errors.ContextOverflowError: a text exceeds the model's context.
            cached_rag.errors.StoreFullError: no room left; what was encoded before is kept.
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
        """Token ids of a text, by the model's own tokenizer, or by `custom_get_token_ids`."""
        if custom := getattr(self, "custom_get_token_ids", None):
            return list(custom(text))
        return self.loaded_engine().tokenization.literal(text).ids
