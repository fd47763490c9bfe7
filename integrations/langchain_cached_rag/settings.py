"""What the chat model and the string model have in common: settings, and an engine behind them.

And how either is found in what an application made of it. Uses public names of `cached_rag` only;
knows no tensor.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any, ClassVar

from langchain_core import exceptions
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import ConfigDict, Field

from cached_rag import ConfigError, GenerationConfig, spi
from cached_rag.errors import BusyError, ContextOverflowError
from langchain_cached_rag.messages import Prompt, filled

Stop = list[str] | None
Run = CallbackManagerForLLMRun | None
AsyncRun = AsyncCallbackManagerForLLMRun | None
# An answer that comes in pieces; what makes chunks of one; and what makes the last chunks, once the
# answer is over.
Pieces = tuple[spi.Stream, Callable[[str], Iterable[Any]], Callable[[], Iterable[Any]]]
# What says where KV is kept, and nothing of answers; a hub's token does not, either.
_SECRET = ("remote", "signing_key")


# Errors that agents know; langchain-core 1.0 has neither.
_TheirOverflow: Any = getattr(exceptions, "ContextOverflowError", Exception)
_TheirLimit: Any = getattr(exceptions, "ModelRateLimitError", Exception)


class ChatOverflowError(ContextOverflowError, _TheirOverflow):  # type: ignore[misc]
    """The messages do not fit, and would not the next time; an agent may shorten them."""


class ChatBusyError(BusyError, _TheirLimit):  # type: ignore[misc]
    """Too many requests wait, and an agent may ask again."""


_BOTH = {ContextOverflowError: ChatOverflowError, BusyError: ChatBusyError}


@contextmanager
def their_errors() -> Iterator[None]:
    """A context in which the engine's errors are raised as LangChain's, too."""
    try:
        yield
    except (ContextOverflowError, BusyError) as error:
        if type(error) not in _BOTH:
            raise
        both = _BOTH[type(error)](*error.args)
        vars(both).update(vars(error))
        raise both from error


class EngineSettings(spi.FrameworkModel):
    """Settings of a model and its store. Objects with the same settings share one engine.

    Nothing is loaded before it is needed.
    """

    model_config = ConfigDict(populate_by_name=True)
    # Applications pass these to any model.
    _hosted: ClassVar[frozenset[str]] = frozenset({"api_key", "base_url", "timeout", "max_retries"})

    model_name: str = Field(default=spi.DEFAULT_MODEL, alias="model")
    """Alias, hub id, folder or GGUF file."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer; they are not part of it."""

    @property
    def _named(self) -> str:
        return self.model_name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on, so that response caches never mix settings."""
        settings = {name: getattr(self, name) for name in spi.GENERATION_SETTINGS}
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
        if access := own.get("model_kwargs"):
            own["model_kwargs"] = {n: v for n, v in access.items() if n != "token"}
        return {"model": self.model_name, **own, **settings}

    def renamed(self, model: str | None) -> EngineSettings:
        """These settings with another model, as a call with `model=` has it; None for the same."""
        if model is None or model == self._model:
            return self
        return self.model_copy(update={"model_name": model, "engine": None})

    def _config(
        self, stop: str | Sequence[str] | None, options: dict[str, Any]
    ) -> GenerationConfig:
        """Settings of one call: the object's, and what was bound or given to the call.

        `stop` is typed as a list by LangChain, which passes on what it is given: a string, too.

        LangChain's own option "stream" says how the call is made, not what it computes.
        """
        options = spi.call_options(options) | ({"stop": stop} if stop else {})
        options.pop("stream", None)
        if "top_logprobs" in options or isinstance(options.get("logprobs"), bool):
            wanted, top = options.pop("logprobs", True), options.pop("top_logprobs", None)
            options["logprobs"] = (top or 0) if wanted else None
        return self.answer_config(options)

    def _get_ls_params(self, stop: Stop = None, **kwargs: Any) -> LangSmithParams:
        """What traces say of a call."""
        stops = list(self._config(stop, {}).stop)
        asked = spi.call_options(kwargs)
        params: LangSmithParams = super()._get_ls_params(stop=stops, **asked)  # type: ignore[misc]
        params["ls_provider"] = "cached-rag"
        params["ls_model_name"] = kwargs.get("model") or self._model
        return params

    def _without_engine(self) -> EngineSettings:
        """For pickling.

        Raises:
            ConfigError: an engine was given.
        """
        if self.engine is not None:
            raise ConfigError(
                "a model with an engine that was given cannot be pickled, as no engine can; give "
                "it model=, store= and the like, with which each process loads its own"
            )
        return super()._without_engine()

    def encode(
        self,
        texts: Iterable[str | Sequence[str]],
        *,
        prompt: BasePromptTemplate[Any] | None = None,
        variable: str = "context",
        progress: spi.Progress = None,
    ) -> spi.EncodeSummary:
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
            ConfigError: `texts` is a single string; or the prompt has no such variable, or another
                one stands before it. A `ValueError`.
            cached_rag.errors.ContextOverflowError: a text exceeds the model's context.
            cached_rag.errors.StoreFullError: no room left; what was encoded before is kept.
        """
        engine, head = self.loaded_engine(), None
        if prompt is not None:
            names = spi.checked(prompt, BasePromptTemplate, "is no prompt template").input_variables
            head = spi.template_head(
                engine, names, variable, lambda v: self._prompt(filled(prompt, v))
            )
        with spi.encode_progress(progress) as shown:
            return engine.encode(texts, head, context="configured", **shown)

    @abstractmethod
    def _prompt(self, value: Any) -> Prompt:
        """A LangChain prompt value as the engine takes it."""

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer, or by `custom_get_token_ids`."""
        if custom := getattr(self, "custom_get_token_ids", None):
            return list(custom(text))
        return self.token_ids(text)

    @abstractmethod
    def _streamed(self, asked: Any, stop: Stop, options: dict[str, Any]) -> Pieces:
        """Begin an answer to messages or a string."""

    def _stream(
        self, asked: Any, stop: Stop = None, run_manager: Run = None, **kwargs: Any
    ) -> Iterator[Any]:
        with their_errors():
            stream, chunks_of, last = self._streamed(asked, stop, kwargs)
            with closing(stream):
                for piece in stream:
                    for chunk in chunks_of(piece):
                        if run_manager:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        yield from last()

    async def _astream(
        self, asked: Any, stop: Stop = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        with their_errors():
            stream, chunks_of, last = await asyncio.to_thread(self._streamed, asked, stop, kwargs)
            async with aclosing(stream.apieces()) as taken:
                async for piece in taken:
                    for chunk in chunks_of(piece):
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        for chunk in last():
            yield chunk

    def _about(
        self, answer: spi.Stream | spi.Generation, model: str | None, *, has_calls: bool = False
    ) -> dict[str, Any]:
        """What goes with an answer: the model, why the answer ended, and the whole report.

        Log probabilities are in OpenAI's form.
        """
        reason = answer.finish_reason
        about = {
            "model_name": model or self._model,
            "model_provider": "cached-rag",
            "finish_reason": "tool_calls" if has_calls and reason == "stop" else reason,
            "cached_rag": answer.report.to_dict(),
        }
        if answer.logprobs:
            by = self.loaded_engine(model).tokenization
            about["logprobs"] = {"content": spi.shown_logprobs(by, answer.logprobs)}
        return about


def unwrapped(llm: Any) -> EngineSettings:
    """The model whose engine reads what a runnable is asked.

    Args:
        llm: a `ChatCachedRAG` or `CachedRAGLLM`; or what `bind`, `bind_tools`, `with_config`,
            `with_retry`, `with_structured_output` or a chain made of one.

    Raises:
        ConfigError: there is no such model in it, or more than one.
    """
    found = {model.engine_key: model for model in _models(llm)}
    if len(found) == 1:
        return next(iter(found.values()))
    names = sorted(model._model for model in found.values())
    inside = f"has {len(found)} models in it ({', '.join(names)})" if found else "has none in it"
    kind = type(llm).__name__
    raise ConfigError(
        f"llm is the model that will read the documents, and a {kind} {inside}; give the "
        "ChatCachedRAG or CachedRAGLLM that answers, before anything was bound to it or piped"
    )


def _models(llm: Any) -> Iterator[EngineSettings]:
    """The models in a runnable, in the order of their use."""
    if isinstance(llm, EngineSettings):
        yield llm
    elif isinstance(llm, RunnableBindingBase):
        for model in _models(llm.bound):
            yield model.renamed(llm.kwargs.get("model"))
    elif isinstance(llm, RunnableSequence):
        for step in llm.steps:
            yield from _models(step)
