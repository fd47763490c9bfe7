"""The engine: texts are encoded once, and prompts that contain them are answered with their KV.

How texts are encoded stands in `base.py`, how a prompt is prefilled in `prefill.py`. Knows no
documents and no framework.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from cached_rag.backends.load import load_backend
from cached_rag.backends.prompt_text import Tokens
from cached_rag.backends.resolve import Variant, plain_json
from cached_rag.backends.thread import on_model_thread, submit
from cached_rag.config import BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.engine import prefill
from cached_rag.engine.base import BaseEngine, Planned, Prompt
from cached_rag.engine.decoding import Generation
from cached_rag.engine.planner import Planner, TextPlanner
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.request import Request
from cached_rag.engine.stream import Stream
from cached_rag.errors import ConfigError
from cached_rag.kv.module import ModuleKV
from cached_rag.library.plan import Plan
from cached_rag.options import parted

_log = logging.getLogger(__name__)

_SHARED: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_SHARING = threading.Lock()


class Engine(BaseEngine):
    """A model and the library of chunks that it has encoded. Safe for several threads.

    `Engine.load` makes one from a model's name; `Engine(wrap_model(...))` takes a model that is
    loaded already. Prompts that are asked at the same time are answered together.
    """

    @classmethod
    def load(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        store: StoreConfig | str | None = None,
        batch: BatchConfig | None = None,
        **options: Any,
    ) -> Engine:
        """Load a model and open its library.

        Args:
            model: alias, hub id, folder or GGUF file.
            store: a folder for KV, or all settings; None keeps KV in memory only.
            batch: bounds on what is answered at the same time.
            options: settings of `ModelConfig` by name, such as `dtype`, `device` and `backend`.

        Raises:
            ModelNotFoundError, ModelError, ConfigError: see `load_backend`.
            MissingPackageError: a package that the backend or the adapter needs is not installed.
        """
        settings = StoreConfig(path=store) if isinstance(store, str) else store
        how = ModelConfig(**parted(options, ModelConfig)[0])
        load = partial(load_backend, model, how.backend, dtype=how.dtype, device=how.device)
        variant = Variant.of(how.revision, how.adapter, how.model_kwargs)
        loaded = submit(partial(load, weights=how.weights, variant=variant)).result()
        if not loaded.can_watch:
            _log.warning(
                "%s: attention cannot be watched here, so less is repaired than elsewhere, and "
                "more answers differ from full prefill's; where that matters ask with "
                'quality="exact" (docs/llama_cpp.md, "Quality")',
                loaded.name,
            )
        return cls(loaded, settings, batch, chat_template_kwargs=how.chat_template_kwargs)

    @classmethod
    def shared(
        cls, model: str = DEFAULT_MODEL, *, store: StoreConfig | None = None, **options: Any
    ) -> Engine:
        """As `load`, but the same arguments give the same engine everywhere in this process."""
        settings = store or StoreConfig()
        how = vars(ModelConfig(**parted(options, ModelConfig)[0]))
        plain = (plain_json(n, v) if n.endswith("_kwargs") else v for n, v in how.items())
        name = (model, settings, *plain)
        with _SHARING:
            engine = _SHARED.get(name)
            if engine is None:
                engine = _SHARED[name] = cls.load(model, store=settings, **options)
            return engine

    def tenant(self, namespace: str) -> Engine:
        """An engine for another tenant: the same model, memory and scheduler, but no common KV.

        Args:
            namespace: the tenant's; engines with the same namespace do share KV. Without a store on
                disk it goes with the last of them that is closed.
        """
        settings = replace(self.settings, namespace=namespace)
        given = self.tokenization.template.kwargs
        return Engine(self.model, settings, chat_template_kwargs=given, beside=self)

    def close(self, finish_seconds: float | None = None) -> None:
        """End all answers, encode what still waits in the background, and release files.

        Doing it again changes nothing.

        Args:
            finish_seconds: how long the encoding may take; None for `StoreConfig.finish_seconds`.
                Ctrl-C ends it sooner.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_scheduler:
            self.scheduler.close()
        else:
            self.scheduler.cancel_all(lambda request: request.resources is self._resources)
        with _SHARING:
            for name in [name for name, engine in _SHARED.items() if engine is self]:
                del _SHARED[name]
        seconds = self.settings.finish_seconds if finish_seconds is None else finish_seconds
        deadline = time.monotonic() + seconds
        try:
            self._resources.learning.close(seconds)
        finally:
            if self._remote is not None and self._owns_scheduler:
                self._remote.close(max(0.0, deadline - time.monotonic()))
            self.library.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Generation ------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Generation:
        """Answer a prompt.

        Args:
            prompt: a string, chat messages, or a prompt of a schema.
            config: how to answer; None for `GenerationConfig()`.
            options: settings that replace those of `config`, by name.

        Raises:
            ConfigError: an unknown or bad setting, or an empty prompt.
            ContextOverflowError: prompt and answer do not fit the context.
            RelocationError: a method was asked for by name that this model cannot run.
            BusyError: too many requests wait already.
            ClosedError: the engine was closed.
        """
        return self.stream(prompt, config, **options).result()

    def generate_batch(
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, **options: Any
    ) -> list[Generation]:
        """Answer several prompts together; each answer is the one that `generate` would give.

        That is so in float32; in bf16, and with weights of few bits, near ties may fall otherwise.

        Raises:
            ConfigError: `prompts` is a single string.
            As `generate`, for the first prompt that fails. The others are then stopped.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts are several; give a single one as a list, [prompt]")
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
        """The answer piece by piece, as it is made.

        A bad setting and a closed engine raise here, all other errors of `generate` when the
        first piece is taken.

        Args:
            prompt, config, options: as in `generate`.
            tenant: while requests wait, those of different tenants take turns.
            clock: from whose start the report's times count; None for one that starts now.
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
        """Prefill a prompt up to the logits of its first answer token. Errors as `generate`.

        Returns:
            The request, with its buffer and logits. Call its `release` when you are done with it:
            the next prompt uses the same memory.
        """
        config = (config or GenerationConfig()).replace(**options)
        self.check_open()
        request = Request(self._resources, self._planner(prompt), config)
        prefill.read(request)
        return on_model_thread(lambda: prefill.alone(request))

    def prompt_kv(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> tuple[list[int], ModuleKV, Report]:
        """Prefill a prompt for another program to answer. Errors as `generate`.

        Returns:
            Its tokens; a copy of the KV of all of them but the last, from position 0 on, empty
            where there is only one; and what was reused.
        """

        def copied() -> ModuleKV:
            assert request.buffer is not None
            try:
                return request.buffer.read(0, len(ids) - 1, tuple(ids[:-1]))
            finally:
                request.release()

        request = self.prefill(prompt, config, **options)
        ids = request.tokens.ids
        return ids, on_model_thread(copied), request.report

    def plan(self, prompt: Prompt, method: str, report: Report) -> tuple[Tokens, Plan]:
        """A prompt's tokens, and which of them come from which chunk.

        Computes nothing, except for modules of a PML schema that are not encoded yet.

        Args:
            method: the plan has the KV that this method would use.
            report: is given the counts and times of planning.
        """
        self.check_open()
        takes = GenerationConfig(method=method).selector().takes
        reading = self._planner(prompt).read(takes)

        def plan() -> tuple[Tokens, Plan]:
            with self.lock, torch.inference_mode():
                return reading(report, lazy=self.library.is_pipelined)

        return on_model_thread(plan)

    def count_tokens(self, prompt: Prompt) -> int:
        """The number of a prompt's tokens, those of the chat template among them."""
        if isinstance(prompt, Planned):
            return prompt.count_tokens(self)
        return len(self.tokenization.tokenize(self._rendered(prompt)))

    def _planner(self, prompt: Prompt) -> Planner:
        if isinstance(prompt, Planned):
            return prompt.planner(self)
        return TextPlanner(
            self.library,
            self.tokenization,
            self._resources.learning,
            self._rendered(prompt),
            self._encoder.start,
            self.sequences if self.settings.harvests else None,
        )
