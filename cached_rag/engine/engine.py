"""The model-facing half: prompt in, text out, with cached modules wherever they occur in it.

Joins encoding, prefilling and generating; the main flow is in `prefill.py`. Knows no document
and no framework.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.thread import on_model_thread, submit
from cached_rag.backends.tokenizer import Message, Rendered, Tokenization, Tokens
from cached_rag.backends.transformers.loading import load_model
from cached_rag.config import DEFAULT_MODEL, BatchConfig, GenerationConfig, StoreConfig
from cached_rag.engine import prefill
from cached_rag.engine.decoding import Generation
from cached_rag.engine.planner import Planner, TextPlanner
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.request import Request, Resources
from cached_rag.engine.scheduler import Scheduler
from cached_rag.engine.stream import Stream
from cached_rag.errors import ClosedError, ConfigError
from cached_rag.kv.buffer import Workspace
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store import ChunkRecord, Maker
from cached_rag.library.background import Activity, WriteBack
from cached_rag.library.context import Context
from cached_rag.library.encode import EncodeSummary
from cached_rag.library.encoder import Encoder
from cached_rag.library.learning import Learning
from cached_rag.library.library import Library
from cached_rag.library.matching import inner_ids
from cached_rag.library.plan import Plan
from cached_rag.library.sequences import Sequences


@runtime_checkable
class Planned(Protocol):
    """A prompt that says itself which of its tokens come from which KV, such as a schema's."""

    def planner(self, engine: Engine) -> Planner:
        """Its tokens and plan on an engine, once they are wanted."""
        ...

    def count_tokens(self, engine: Engine) -> int:
        """How many tokens it has."""
        ...

    def plain(self) -> str | Sequence[Message]:
        """The same as any prompt."""
        ...


Prompt = str | Sequence[Message] | Rendered | Planned

_SHARED: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_SHARING = threading.Lock()


class Engine:
    """A model and its library of modules. Safe for several threads.

    All answers are made by its scheduler: those wanted at the same time, together.

    Use `Engine.load`; or give a `Backend`, such as `wrap_model`'s.
    """

    def __init__(
        self,
        model: Backend,
        store: StoreConfig | None = None,
        batch: BatchConfig | None = None,
        *,
        beside: Engine | None = None,
    ) -> None:
        """Open the store.

        Args:
            batch: bounds on answers made at the same time.
            beside: see `tenant`.
        """
        self.model = model
        self._is_closed = False
        settings = store or StoreConfig()
        if settings.pipelined is None:
            settings = replace(settings, pipelined=model.shapes.device.type == "cuda")
        self.settings = settings
        memory = beside.library.memory if beside else None
        maker = Maker(model.fingerprint, model.name, str(model.shapes.dtype).removeprefix("torch."))
        self.library: Library = Library(settings, maker, model.shapes.device, memory, self._let_go)
        self.tokenization = Tokenization(model.tokenizer)
        self.lock = model.lock
        self._encoder = Encoder(model, self.library, self.tokenization)
        shared = beside._resources if beside else None
        activity = shared.activity if shared else Activity()
        learning = Learning(self.library, self._encoder, settings, self.lock, activity)
        self._resources: Resources = Resources(
            model,
            self.tokenization,
            self.library,
            learning,
            shared.sequences
            if shared
            else Sequences(settings.sequence_bytes, keeps_repaired=settings.keeps_repaired),
            shared.workspace if shared else Workspace(model.shapes),
            activity,
        )
        self._owns_scheduler = beside is None
        self.scheduler: Scheduler = (
            beside.scheduler if beside else Scheduler(model, batch or BatchConfig())
        )

    @property
    def sequences(self) -> Sequences:
        """KV that prompts left, all tenants'."""
        return self._resources.sequences

    @property
    def write_back(self) -> WriteBack | None:
        """Encodes in the background what requests missed; None if switched off."""
        return self._resources.learning.write_back

    @classmethod
    def load(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        store: StoreConfig | str | None = None,
        batch: BatchConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
    ) -> Engine:
        """Load a model by alias, hub id, folder or GGUF file; `store` is a folder or settings.

        Raises:
            ModelNotFoundError, ModelError: see `load_model`.
        """
        settings = StoreConfig(path=store) if isinstance(store, str) else store
        return cls(submit(lambda: load_model(model, dtype, device)).result(), settings, batch)

    @classmethod
    def shared(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        store: StoreConfig | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> Engine:
        """As `load`, but one engine for all in this process who ask for the same."""
        settings = store or StoreConfig()
        with _SHARING:
            name = (model, settings, dtype, device)
            engine = _SHARED.get(name)
            if engine is None:
                engine = cls.load(model, store=settings, dtype=dtype, device=device)
                _SHARED[name] = engine
            return engine

    def tenant(self, namespace: str) -> Engine:
        """An engine on the same model, memory and scheduler that shares no KV with this one."""
        settings = replace(self.settings, namespace=namespace)
        return Engine(self.model, settings, beside=self)

    def close(self, finish_seconds: float | None = None) -> None:
        """End all answers, finish what waits in the background, and release files.

        Doing it again changes nothing.

        Args:
            finish_seconds: how long that may go on; None for `StoreConfig.finish_seconds`. Ctrl-C
                ends it sooner.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_scheduler:
            self.scheduler.close()
        with _SHARING:
            for name in [name for name, engine in _SHARED.items() if engine is self]:
                del _SHARED[name]
        try:
            self._resources.learning.close(finish_seconds)
        finally:
            self.library.close()

    def check_open(self) -> None:
        """Whether it may still be asked.

        Raises:
            ClosedError: it was closed.
        """
        if self._is_closed:
            raise ClosedError(
                f"this engine ({self.model.name}) was closed; make another one (Engine.load, "
                "Engine.shared, CachedRAG.open), and close it only when it is not asked any more"
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Modules ---------------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str],
        prefix: Prompt | None = None,
        progress: Callable[[int], object] = lambda _: None,
        *,
        context: Context | None = None,
        token_progress: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; those that are there already cost nothing.

        Args:
            texts: each becomes a module, found later wherever a prompt contains it verbatim
                (surrounding white space aside).
            prefix: what they will stand behind (see `head`); None for BOS alone.
            progress: called with the number of modules prefilled, after each batch.
            context: what stands between prefix and text while it is prefilled; None for nothing.
            token_progress: as `progress`, with the number of their tokens.

        Raises:
            ContextOverflowError: a text exceeds the model's context.
            StoreFullError: no room left; what was encoded before is kept.
            ClosedError: as all that reads or writes modules, after `close`.
        """
        self.check_open()
        rendered = None if prefix is None else self._rendered(prefix)
        order = self._encoder.read(texts, rendered, context)

        def done(modules: int, tokens: int) -> None:
            progress(modules)
            token_progress(tokens)

        def encode() -> EncodeSummary:
            with self.lock:
                return self._encoder.encode(order, done)

        return on_model_thread(encode)

    def register(self, texts: Sequence[str]) -> int:
        """Make texts known as modules without prefilling them; says how many tokens they have.

        The first prompt that contains one computes it as any text, and counts it as missed; then
        it is encoded in the background.
        """
        self.check_open()
        return self._encoder.register(texts)

    def prefetch(self, texts: Sequence[str]) -> None:
        """Begin to bring texts' KV from disk into memory; a prompt with them will follow."""
        self.check_open()
        self.library.prefetch(texts)

    def forget(self, texts: Sequence[str]) -> int:
        """Drop texts and all KV of them, whichever process encoded it; says how many KVs went.

        No answer that is asked for from then on uses it.
        """
        self.check_open()
        return self.library.remove({digest(text.strip()) for text in texts})

    def _let_go(self, modules: Sequence[ChunkRecord]) -> None:
        """Drop what earlier prompts left of modules that are none any more."""
        self._encoder.let_go()
        namespace = self.settings.namespace
        for module in modules:
            self.sequences.forget(namespace, module.text_digest, inner_ids(module))
            self.scheduler.forget(namespace, inner_ids(module))

    def head(self, messages: Sequence[Message], before: str) -> Rendered:
        """What a chat prompt says before the text `before`, as a prefix for `encode`.

        Raises:
            ConfigError: `before` does not occur in the rendered messages.
        """
        rendered = self.tokenization.render(messages)
        at = rendered.text.find(before)
        if at < 0:
            raise ConfigError(f"the rendered messages do not contain {before!r}")
        return rendered.until(at)

    # Generation ------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Generation:
        """Answer a prompt (a string, or chat messages); options override the config's settings.

        Raises:
            ConfigError: an unknown or bad setting.
            ContextOverflowError: prompt and answer do not fit the context.
            RelocationError: an explicitly chosen method needs what the model cannot do.
            ClosedError: the engine was closed.
        """
        return self.stream(prompt, config, **options).result()

    def generate_batch(
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, **options: Any
    ) -> list[Generation]:
        """Answer several prompts, their tokens computed together; each as `generate` would.

        Raises:
            As `generate`, for the first prompt that fails; the others are stopped then.
            BusyError: more prompts than may wait.
        """
        streams = [self.stream(prompt, config, **options) for prompt in prompts]
        try:
            for stream in streams:
                stream.start()
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        tenant: str = "",
        clock: Clock | None = None,
        **options: Any,
    ) -> Stream:
        """The answer piece by piece, as it is made. Errors as `generate`, at the first piece.

        Args:
            tenant: where requests have to wait, those of different tenants take turns.
            clock: what the report's times are read from; None for one that starts now.
        """
        clock = clock or Clock()
        config = (config or GenerationConfig()).replace(**options)
        self.check_open()
        planner = self._planner(prompt)
        return Stream(
            self.scheduler, Request(self._resources, planner, config, tenant, clock=clock)
        )

    def prefill(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Request:
        """Everything up to the logits of the first answer token. Errors as `generate`.

        Returns:
            The request, to be released so that the next one can use its memory.
        """
        config = (config or GenerationConfig()).replace(**options)
        self.check_open()
        request = Request(self._resources, self._planner(prompt), config)
        prefill.read(request)
        return on_model_thread(lambda: prefill.alone(request))

    def plan(self, prompt: Prompt, method: str, report: Report) -> tuple[Tokens, Plan]:
        """The prompt's tokens, and which of them come from which module.

        Computes nothing, unless modules of a schema are not encoded yet.
        """
        self.check_open()
        takes = GenerationConfig(method=method).selector().takes
        reading = self._planner(prompt).read(takes)

        def plan() -> tuple[Tokens, Plan]:
            with self.lock, torch.inference_mode():
                return reading(report, lazy=self.library.is_pipelined)

        return on_model_thread(plan)

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template and all."""
        if isinstance(prompt, Planned):
            return prompt.count_tokens(self)
        return len(self.tokenization.tokenize(self._rendered(prompt)))

    def _rendered(self, prompt: Prompt) -> Rendered:
        if isinstance(prompt, Planned):
            prompt = prompt.plain()
        return prompt if isinstance(prompt, Rendered) else self.tokenization.render(prompt)

    def _planner(self, prompt: Prompt) -> Planner:
        if isinstance(prompt, Planned):
            return prompt.planner(self)
        return TextPlanner(
            self.library, self.tokenization, self._resources.learning, self._rendered(prompt)
        )
