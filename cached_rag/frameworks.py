"""What models of frameworks have in common: settings, the engine behind them, what is encoded when.

For integrations, by way of `cached_rag.spi`. Knows pydantic, as frameworks' models are made of it;
knows no framework.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args
from weakref import WeakValueDictionary

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    create_model,
    field_serializer,
    field_validator,
)

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.config import DEFAULT_MODEL, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, ContextOverflowError, StoreError
from cached_rag.library.encode import EncodeSummary
from cached_rag.library.ledger import HALF_PAIR
from cached_rag.options import parted, settings_of, unknown_settings
from cached_rag.rag.rag import CachedRAG

if TYPE_CHECKING:
    from typing_extensions import Self

Encode = Literal["eager", "background", "off"]
_log = logging.getLogger(__name__)

# What only a call can ask for.
CALL_SETTINGS = frozenset({"ignore_eos", "logprobs", "grammar", "shows_control"})
# Options of a call that say how a hosted model is reached: a local one has no use for them.
_REMOTE_CALL = frozenset({"extra_headers", "extra_query", "timeout"})
_ANSWERS = settings_of(GenerationConfig)
GENERATION_SETTINGS = tuple(name for name in _ANSWERS if name not in CALL_SETTINGS)
_NEVER_NONE = {"model"} | {name for name, one in _ANSWERS.items() if one.default is not None}
# What an engine is loaded with, besides its model and its store's folder.
_LOADED_WITH = settings_of(ModelConfig, StoreConfig)
_LOADING = tuple(name for name in _LOADED_WITH if name != "path")
# Settings that may have a password or a token in them.
_SECRETIVE = ("remote", "model_kwargs")
_HIDDEN = "**********"

if TYPE_CHECKING:

    class _Fields(BaseModel):
        """Its fields are made below."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Fields = create_model(
        "_Fields",
        **{
            name: (one.type, Field(one.default, description=one.help, repr=name not in _SECRETIVE))
            for name, one in (_LOADED_WITH | _ANSWERS).items()
            if name in (*_LOADING, *GENERATION_SETTINGS)
        },
    )


class _Engines(dict[str, Engine]):
    """Engines by their models' names; no weak reference is possible to a dict itself."""


@dataclass(frozen=True)
class _Loaded:
    """Engines that were loaded, by their models' names, and what they were loaded with.

    Attributes:
        kept: those that objects with the same `engine_key` loaded, for some frameworks make one for
            each call and drop it. The process forgets engines that nobody holds.
    """

    settings: tuple[object, ...]
    kept: _Engines
    engines: dict[str, Engine] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loaded:
        """Itself: copies share engines, which cannot be copied."""
        return self


_KEPT: WeakValueDictionary[tuple[object, ...], _Engines] = WeakValueDictionary()


class FrameworkModel(_Fields):
    """A framework's model: settings, and an engine behind them that is loaded when it is needed.

    Objects with the same settings share one engine, and so do copies. An integration's model
    extends this class and its framework's own, in this order, adds a field with the model's name,
    and returns that as `_named`.

    Besides those that stand here, the fields are the settings of `ModelConfig` and `StoreConfig`,
    and of `GenerationConfig` all that a whole application can want.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    # Settings of hosted models that are taken and have no effect.
    _hosted: ClassVar[frozenset[str]] = frozenset()

    store: str | None = Field(default=None, description="Folder for KV; None keeps it in memory.")
    signing_key: SecretStr | None = Field(
        default=None,
        description="KV on disk and in a remote store that is not signed with it is not used.",
    )
    engine: Engine | CachedRAG | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="One to share, instead of a model, a store and what they are loaded with.",
    )
    stop: list[str] | None = Field(
        default=None, description="Strings that end the answer; they are not part of it."
    )
    _loaded: _Loaded | None = PrivateAttr(default=None)

    def __init__(self, **settings: Any) -> None:
        """Check the settings; nothing is loaded.

        Raises:
            ConfigError: a setting is unknown, out of range, or one that the engine that was given
                has already. A `ValueError`, as what a setting of the wrong type raises.
        """
        given = {name: value for name, value in settings.items() if name not in self._hosted}
        super().__init__(**_of_the_tenant(self._by_field(given)))
        self.answer_config({})
        self._loaded_with()
        self._check_given()

    def __setattr__(self, name: str, value: Any) -> None:
        """As pydantic's, with the namespace of an engine that is given now."""
        for one, held in _of_the_tenant({name: value}).items():
            super().__setattr__(one, held)

    def model_post_init(self, context: Any, /) -> None:
        """Hold what others with the same settings have loaded.

        Written out, because pydantic's own for private attributes does not call the framework's.
        """
        super().model_post_init(context)
        self._held()

    @field_serializer("signing_key", *_SECRETIVE)
    def _hide(self, value: Any) -> Any:
        """What is saved has no secret."""
        if isinstance(value, Mapping):
            told = value.get("token")  # which may be False, for none
            return {**value, "token": _HIDDEN} if isinstance(told, str) else dict(value)
        is_key = isinstance(value, SecretStr)
        return _HIDDEN if is_key or any(mark in (value or "") for mark in "@?") else value

    @field_validator("signing_key", *_SECRETIVE)
    @classmethod
    def _is_no_mask(cls, value: Any, info: ValidationInfo) -> Any:
        held = value.get_secret_value() if isinstance(value, SecretStr) else value
        if held == _HIDDEN or (isinstance(held, Mapping) and _HIDDEN in held.values()):
            raise ValueError(
                f"settings are saved without secrets, as {info.field_name} is or has one; give it "
                "again, beside the saved settings"
            )
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    @abstractmethod
    def _named(self) -> str:
        """The setting that names the model."""

    @property
    def _model(self) -> str:
        """The model's name as users see it: that of the engine, if one was given."""
        if isinstance(self.engine, CachedRAG):
            return str(self.engine.settings["model"])
        return self.engine.model.name if self.engine is not None else self._named

    # Settings --------------------------------------------------------------------------------

    @classmethod
    def _by_field(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings by the names of their fields, of which some have another name, too."""
        known = cls.model_fields
        fields = {one.alias or name: name for name, one in known.items()}
        if unknown := given.keys() - known.keys() - fields.keys():
            raise ConfigError(unknown_settings(sorted(unknown), known))
        for alias, name in fields.items():
            if alias != name and {alias, name} <= given.keys():
                raise ConfigError(f"{name} and {alias} are one setting; give one of them")
        return {fields.get(name, name): value for name, value in given.items()}

    def changed_settings(self) -> dict[str, Any]:
        """Of what an engine is loaded with, all that is not the default."""
        own = {name: getattr(self, name) for name in _LOADING}
        changed = {n: value for n, value in own.items() if value != _LOADED_WITH[n].default}
        return changed if self.store is None else {"store": self.store, **changed}

    def answer_config(self, options: Mapping[str, Any]) -> GenerationConfig:
        """Settings of one call: the object's, and what was given to the call.

        Raises:
            ConfigError: one is unknown or out of range.
        """
        settings = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        settings["stop"] = self.stop or ()
        return GenerationConfig(**settings).replace(**call_options(options))

    def _loaded_with(self) -> tuple[StoreConfig, dict[str, Any]]:
        """A store's settings, and the other options of `Engine.load`."""
        own = {name: getattr(self, name) for name in _LOADING}
        own["signing_key"] = self.signing_key and self.signing_key.get_secret_value()
        model, store = parted(own, ModelConfig, StoreConfig)
        return StoreConfig(path=self.store, **store), model

    def _check_given(self) -> None:
        """Refuse settings that an engine that was given cannot take any more."""
        if self.engine is None:
            return
        changed = self.changed_settings().keys() - {"namespace"}  # see `loaded_engine`
        if self._named not in (DEFAULT_MODEL, self._model):
            changed |= {"model"}
        if changed:
            raise ConfigError(
                f"{', '.join(sorted(changed))}: the engine that was given is loaded, and has a "
                "store of its own; give these to Engine.load, or leave engine= out"
            )

    @property
    def engine_key(self) -> tuple[object, ...]:
        """Models with the same key have the same engine."""
        if self.engine is not None:
            return (id(_inner(self.engine)),)
        return (self._named, *self._loading)

    @property
    def _loading(self) -> tuple[object, ...]:
        """All but the model's name that an engine is loaded with."""
        own = self.changed_settings()
        key = own.pop("signing_key", None)  # which as text would be any other
        return (key, *((name, repr(value)) for name, value in own.items()))

    # The engine ------------------------------------------------------------------------------

    def loaded_engine(self, model: str | None = None) -> Engine:
        """The engine, loaded on first use; with `model`, one of another model instead.

        Raises:
            ModelNotFoundError, ModelError: see `cached_rag.load_model`.
            ConfigError: an engine was given, and a setting that it cannot take any more, such as a
                namespace that is not its own.
        """
        if model is not None and model != self._model:
            return self._shared(model)
        if self.engine is None:
            return self._shared(self._named)
        self._check_given()
        given = self.engine.engine if isinstance(self.engine, CachedRAG) else self.engine
        theirs = given.library.namespace
        if self.namespace not in ("", theirs):
            raise ConfigError(
                f"namespace={self.namespace!r} was set, and the engine that was given keeps KV of "
                f"{theirs!r}; give engine.tenant({self.namespace!r}) as the engine, or leave "
                "engine= out"
            )
        return given

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
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, which would copy an engine that was given, too, if there are updates.

        Raises:
            ConfigError: a setting is unknown, which pydantic's would take and pass over.
        """
        own = self._by_field(update or {})
        changed = {"engine": self.engine, **_of_the_tenant(own)} if own else None
        return super().model_copy(update=changed, deep=deep)

    def __getstate__(self) -> dict[Any, Any]:
        """For pickling: the settings, by which whoever unpickles them loads an engine."""
        bare = self._without_engine()
        bare._loaded = None
        return super(FrameworkModel, bare).__getstate__()

    def _without_engine(self) -> Self:
        """A copy without an engine that was given; frameworks differ in what becomes of that."""
        return self.model_copy(update={"engine": None})

    # Chunks ----------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, *args: Any, **kwargs: Any) -> EncodeSummary:
        """Prefill texts; each framework has options of its own.

        Raises:
            ConfigError: `texts` is a single string.
            ContextOverflowError: a text exceeds the model's context.
        """

    def register(self, texts: Iterable[str]) -> None:
        """Know texts as chunks: those that prompts contain are encoded after the answers."""
        self.loaded_engine().register(texts)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring texts' KV into memory; see `cached_rag.Engine.prefetch`."""
        self.loaded_engine().prefetch(texts)

    def order(self, texts: Iterable[str]) -> list[int]:
        """Indices of texts as an earlier prompt began with them; see `cached_rag.Engine.order`."""
        return self.loaded_engine().order(texts)

    def forget(self, texts: Iterable[str]) -> None:
        """Drop texts and their KV."""
        self.loaded_engine().forget(texts)

    def hold(self, texts: Iterable[str], **terms: Any) -> int:
        """Pin KV of texts, or let it live for a time; see `cached_rag.Engine.hold`."""
        return self.loaded_engine().hold(texts, **terms)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        return self.loaded_engine().tokenization.literal(text).ids


def _of_the_tenant(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the namespace of an engine among them: with another model it is the same."""
    engine = _inner(settings.get("engine"))
    if not isinstance(engine, Engine) or settings.get("namespace"):
        return settings
    return {**settings, "namespace": engine.library.namespace}


def _inner(given: Any) -> Any:
    """An engine, or an index's; the index itself while it has none, which is then no tenant's."""
    return given.loaded or given if isinstance(given, CachedRAG) else given


def call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A call's options less those that change nothing: None for what cannot be None."""
    return {
        name: value
        for name, value in options.items()
        if name not in _REMOTE_CALL and (value is not None or name not in _NEVER_NONE)
    }


@dataclass(frozen=True)
class Learner:
    """A framework's model, and what happens to texts that have no KV.

    Attributes:
        encode: "eager" prefills them now, "background" after the first answer that used them, "off"
            leaves them to others.
        options: what the model's `encode` is given besides the texts.

    Raises:
        ConfigError: `encode` is none of these, or a prompt among the options is a string.
    """

    llm: FrameworkModel
    encode: Encode = "background"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.encode not in get_args(Encode):
            raise ConfigError(f"encode is one of {get_args(Encode)}, not {self.encode!r}")
        if isinstance(prompt := self.options.get("prompt"), str):
            raise ConfigError(f"prompt is a PromptTemplate, or another template, not {prompt!r}")

    def learn(self, texts: Sequence[str], sources: Sequence[Hashable] | None = None) -> None:
        """Do that. What no tokenizer takes, exceeds the context or no store takes is only logged.

        A framework's store has them by then, so one such text must not keep the others from KV.

        Args:
            sources: what names the document that each text is a part of: neighbours with the same
                are its chunks, in their order. None if each stands alone.
        """
        if self.encode == "off":
            return
        known = sources or range(len(texts))
        pairs = [one for one in zip(texts, known, strict=True) if not HALF_PAIR.search(one[0])]
        whole = [text for text, _ in pairs]
        if len(whole) < len(texts):
            _log.warning(
                "documents that stay without KV: %d, as half of a surrogate pair stands alone in "
                "them, which no tokenizer takes; replace it when the documents are read",
                len(texts) - len(whole),
            )
        if self.encode == "eager":
            by_document = groupby(pairs, key=itemgetter(1))
            self._encode([[text for text, _ in group] for _, group in by_document])
        else:
            self.llm.register(whole)

    def _encode(self, texts: Sequence[str | Sequence[str]]) -> None:
        try:
            self.llm.encode(texts, **self.options)
        except ContextOverflowError as error:
            if len(texts) == 1 and not isinstance(texts[0], str):
                texts = texts[0]
            if len(texts) == 1:
                _log.warning("a document stays without KV: %s", error)
                return
            middle = len(texts) // 2
            self._encode(texts[:middle])
            self._encode(texts[middle:])
        except StoreError as error:
            _log.warning("documents stay without KV until an answer has used them: %s", error)
            self.llm.register(t for one in texts for t in ([one] if isinstance(one, str) else one))


def checked(given: Any, kind: type, said: str) -> Any:
    """What was given, if it is of a kind.

    Args:
        said: words for what is of another kind, and what to give instead.

    Raises:
        ConfigError: it is of another kind.
    """
    if not isinstance(given, kind):
        raise ConfigError(f"a {type(given).__name__} {said}")
    return given


def template_head(
    engine: Engine,
    variables: Iterable[str],
    variable: str,
    fill: Callable[[Mapping[str, str]], str | Sequence[Message]],
) -> str | Rendered:
    """What every prompt of a template says before its chunks, as the prefix of `Engine.encode`.

    Args:
        variables: names of all variables of the template.
        variable: the one that is filled with chunks.
        fill: makes the prompt, a string or chat messages, from a value for each variable.

    Raises:
        ConfigError: the template has no such variable, or another one stands before it.
    """
    marks = {name: f"[the value of {name}]" for name in variables}
    if variable not in marks:
        raise ConfigError(f"the prompt has no variable {variable!r}; it has {sorted(marks)}")
    prompt, before = fill(marks), marks[variable]
    if isinstance(prompt, str):
        text, found, _ = prompt.partition(before)
        if not found:
            raise ConfigError(
                f"the prompt does not show {{{variable}}} as it is, as where a template or a "
                "function alters it, so documents cannot be encoded as it will show them; leave "
                "the prompt out, or the variable unaltered"
            )
        head: str | Rendered = text
    else:
        head = engine.head(prompt, before)
        text = head.text
    for name, mark in marks.items():
        if mark in text:
            raise ConfigError(
                f"{{{name}}} stands before {{{variable}}} in the prompt, so that prompts have no "
                f"common beginning to encode documents behind; put {{{variable}}} first, or leave "
                "the prompt out"
            )
    return head
