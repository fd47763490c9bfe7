"""The engine: texts are encoded once, and prompts that contain them are answered with their KV.

Here the parts are joined: the model, the library of chunks, the scheduler of requests. How a prompt
is prefilled stands in `prefill.py`. Knows no documents and no framework.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakSet, WeakValueDictionary

from cached_rag.backends.base import Backend, exclusively
from cached_rag.backends.prompt_text import Message, Rendered, Tokens
from cached_rag.backends.resolve import Variant, plain_json
from cached_rag.backends.thread import on_model_thread, submit
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import DEFAULT_MODEL, BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.engine import prefill
from cached_rag.engine.decoding import Generation
from cached_rag.engine.idle import Audits
from cached_rag.engine.planner import Planner, TextPlanner
from cached_rag.engine.prompt import AskedPrompt, Prefilling
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.request import Request
from cached_rag.engine.resources import Resources, Shared, completed, load_backend, remote_tier
from cached_rag.engine.scheduler import Scheduler
from cached_rag.engine.stream import Stream
from cached_rag.errors import ClosedError, ConfigError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import ChunkRecord, Maker, inner_ids
from cached_rag.kv.entries import until_when
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import Context, EncodeSummary, primer
from cached_rag.library.encoder import Encoder, several
from cached_rag.library.learning import WriteBack
from cached_rag.library.library import Library
from cached_rag.library.plan import Plan
from cached_rag.library.sequences import Sequences
from cached_rag.options import parted

_log = logging.getLogger(__name__)

_SHARED: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_SHARING = threading.Lock()
_OPEN: WeakSet[Engine] = WeakSet()


@runtime_checkable
class Planned(Protocol):
    """A prompt that decides itself which of its tokens come from which KV, as PML prompts do."""

    def planner(self, engine: Engine) -> Planner:
        """What finds the prompt's tokens and makes its plan, when the engine asks for them."""

    def count_tokens(self, engine: Engine) -> int:
        """The number of its tokens."""

    def plain(self) -> str | Sequence[Message]:
        """The same prompt as ordinary text, or as chat messages."""


Prompt = str | Sequence[Message] | Rendered | Planned


class Engine:
    """A model and the library of chunks that it has encoded. Safe for several threads.

    A forked process has to make its own: there, those that were made before are closed.

    `Engine.load` makes one from a model's name; `Engine(wrap_model(...))` takes a model that is
    loaded already. Prompts that are asked at the same time are answered together.

    Attributes:
        sequences: KV that finished prompts left, of all tenants.
        audits: how far answers begin as full prefill's would; see `StoreConfig.audit_rate`.
        write_back: the thread that encodes what requests missed; None if it is switched off.
    """

    def __init__(
        self,
        model: Backend,
        store: StoreConfig | None = None,
        batch: BatchConfig | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        beside: Engine | None = None,
    ) -> None:
        """Open the store.

        Args:
            model: what runs the model.
            store: where KV is kept; None for `StoreConfig()`, which keeps it in memory.
            batch: bounds on what is answered at the same time; None for `BatchConfig()`.
            chat_template_kwargs: what the model's chat template is given besides the messages, such
                as {"enable_thinking": False}.
            beside: the engine whose memory and scheduler this one uses, as `tenant` does.

        A store on disk that cannot be opened is logged, and nothing is kept on disk.

        Raises:
            ConfigError: `model` is a name, or a model of transformers.
        """
        if not hasattr(model, "shapes"):
            raise ConfigError(
                f"an engine takes what load_model or wrap_model gives, not {type(model).__name__}; "
                "for a name: Engine.load(NAME)"
            )
        self.model = model
        self._is_closed = False
        self.settings = settings = completed(store or StoreConfig(), model)
        maker = Maker(model.fingerprint, model.name, str(model.shapes.dtype).removeprefix("torch."))
        remote = beside.library.shelf.remote if beside else remote_tier(model, settings)
        self.library: Library = Library(
            settings,
            maker,
            model.shapes.device,
            beside.library if beside else None,
            remote=remote,
        )
        self.tokenization = Tokenization(model.tokenizer, chat_template_kwargs)
        self.lock = model.lock
        self._encoder = Encoder(model, self.library, self.tokenization, composes=settings.composes)
        shared = beside._resources.shared if beside else Shared(model, settings)
        self._resources: Resources = Resources(self._encoder, settings, shared)
        self.sequences: Sequences = shared.sequences
        self.audits: Audits = shared.audits
        self.write_back: WriteBack | None = self._resources.learning.write_back
        self.sequences.resume(settings.namespace, self.library.seen)
        self._owns_scheduler = beside is None
        self.scheduler: Scheduler = (
            beside.scheduler if beside else Scheduler(model, batch or BatchConfig(), self.sequences)
        )
        self.library.when_forgotten(self._let_go)  # which needs all of these
        _OPEN.add(self)

    @classmethod
    def load(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        store: StoreConfig | str | Path | None = None,
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
        settings = StoreConfig(path=str(store)) if isinstance(store, str | Path) else store
        how = ModelConfig(**parted(options, ModelConfig, beside=("model", "store"))[0])
        load = partial(load_backend, model, how.backend, dtype=how.dtype, device=how.device)
        variant = Variant.of(how.revision, how.adapter, how.model_kwargs)
        loaded = submit(partial(load, weights=how.weights, variant=variant)).result()
        if loaded.rule.is_movable and not loaded.can_watch:
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
                disk, texts and their KV go with the last of them that is closed. What prompts left
                (`sequence_bytes`) is there for the next, unless others forgot texts meanwhile.
        """
        self.check_open()
        settings = replace(self.settings, namespace=namespace)
        given = self.tokenization.template.kwargs
        return Engine(self.model, settings, chat_template_kwargs=given, beside=self)

    def close(self, finish_seconds: float | None = None) -> None:
        """End all answers, encode what still waits in the background, and release files.

        Doing it again changes nothing.

        Args:
            finish_seconds: how long all of that may take; None for `StoreConfig.finish_seconds`.
                Ctrl-C ends it sooner.
        """
        if self._is_closed:
            return
        self._is_closed = True
        seconds = self.settings.finish_seconds if finish_seconds is None else finish_seconds
        deadline = time.monotonic() + seconds
        with _SHARING:
            for name in [name for name, engine in _SHARED.items() if engine is self]:
                del _SHARED[name]
        owns_all, mine = self._owns_scheduler, self._resources
        archive = mine.shared.archive if owns_all else None
        remote = self.library.shelf.remote if owns_all else None
        try:
            if owns_all:
                self.scheduler.close()
            try:
                self.scheduler.cancel_all(
                    lambda it: owns_all or it.prompt.resources is mine, seconds
                )
            except BaseException:  # who interrupts that waits for nothing else
                mine.learning.close(0)
                raise
            mine.learning.close(deadline)
            self.library.refresh()  # nothing is written of what others have forgotten
            if archive is not None:
                self.sequences.close(deadline)
        finally:
            if archive is not None:
                archive.close()
            if remote is not None:
                remote.close(max(0.0, deadline - time.monotonic()))
            if self.library.shelf.disk is not None:  # where others may forget texts meanwhile
                self.sequences.leave(self.settings.namespace, self.library.seen)
            self.library.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Check that the engine was not closed.

        Raises:
            ClosedError: it was.
        """
        if self._is_closed:
            raise ClosedError(
                f"this engine ({self.model.name}) was closed; make another one (Engine.load, "
                "Engine.shared, CachedRAG.open), and close it only when it is not asked any more; "
                "a forked process has to make its own"
            )

    # Texts -----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str | Sequence[str]],
        prefix: Prompt | None = None,
        progress: Callable[[int], object] = lambda _: None,
        *,
        context: Context | Sequence[Context | None] | Literal["configured"] | None = "configured",
        token_progress: Callable[[int], object] = lambda _: None,
        token_total: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """Prefill texts and keep their KV. Texts whose KV is kept already cost nothing.

        Answers go on meanwhile: they wait for a batch of texts, not for all.

        Args:
            texts: each becomes a chunk. It is found later in every prompt that contains it
                verbatim, but for white space at its ends. A list among them has the chunks of one
                document in their order; behind a context they are read behind each other, too,
                which brings answers nearer (docs/methods.md, "How chunks are encoded").
            prefix: what prompts will say before their chunks (see `head`); None for the
                tokenizer's BOS token, if it has one.
            progress: called after each batch with the number of chunks in it.
            context: texts that stand between the prefix and the chunk while it is prefilled, such
                as `PRIMER`; None for nothing. Of several each is a pass of its own, whose KV is
                kept beside the others'. "configured" for what answers are nearest to full prefill
                with, as far as the store's settings go (see `contexts`).
            token_progress: called after each batch with the number of tokens in it.
            token_total: called before the first batch with the number of tokens in all of them.

        Raises:
            ConfigError: `context` is an empty sequence, or an unknown word; `texts` is a single
                string.
            ContextOverflowError: a text exceeds the model's context.
            StoreError: the files of the store could not be opened.
            StoreFullError: no room is left; what was encoded before is kept.
            ClosedError: the engine was closed.
        """
        self.check_open()
        rendered = None if prefix is None else self._rendered(prefix)
        contexts = self._asked_for(context, prefix)
        order = self._encoder.read(texts, rendered, contexts)

        def done(chunks: int, tokens: int) -> None:
            progress(chunks)
            token_progress(tokens)

        return self._encoder.encode(order, done, token_total)

    def _asked_for(
        self,
        context: Context | Sequence[Context | None] | str | None,
        prefix: Prompt | None,
    ) -> Sequence[Context | None]:
        """The contexts that `encode` was asked for, each a pass. Errors as there."""
        if context == "configured":
            return self.contexts(prefix)
        if isinstance(context, str):
            raise ConfigError(
                f'context is a Context, several of them, None or "configured", not {context!r}'
            )
        contexts = (context,) if context is None or isinstance(context, Context) else context
        if not contexts:
            raise ConfigError("no context at all was given; None stands for nothing")
        return contexts

    @property
    def primer(self) -> Context:
        """What texts are best encoded behind, besides a prefix: `StoreConfig.primers` of them."""
        return primer(self.settings.primers)

    def contexts(self, prefix: Prompt | None) -> tuple[Context | None, ...]:
        """What texts are encoded behind, besides this prefix, unless told otherwise; a pass each.

        That is `primer`; and with `StoreConfig.first_exact`, where there is a prefix, nothing.
        """
        is_twice = self.settings.first_exact and prefix is not None
        return (self.primer, None) if is_twice else (self.primer,)

    def register(self, texts: Iterable[str]) -> int:
        """Make texts known as chunks without prefilling them.

        The first prompt that contains such a chunk computes it as ordinary text, and its report
        counts it as missed. The chunk is then encoded in the background.

        Returns:
            The number of tokens in the texts.

        Raises:
            ConfigError: `texts` is a single string.
        """
        self.check_open()
        return self._encoder.register(texts)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts from disk, because a prompt with them will follow.

        A text that is not in that prompt as it is here is looked for in parts, and the report says
        so.

        Raises:
            ConfigError: `texts` is a single string.
        """
        self.check_open()
        texts = several(texts)
        self.library.handed_over.add(texts)
        self.library.prefetch(texts)

    def order(self, texts: Iterable[str]) -> list[int]:
        """Indices of texts in an order in which an earlier prompt began with them.

        What a prompt has in common with it is then reused without loss. Texts that continue no
        earlier prompt keep their order, behind the others.

        Raises:
            ConfigError: `texts` is a single string.
        """
        names = [digest(text.strip()) for text in several(texts)]
        return self.sequences.order(self.settings.namespace, names)

    def forget(self, texts: Iterable[str]) -> int:
        """Forget texts, and delete all KV of them, whichever process encoded it.

        No answer that is asked for from then on uses that KV. What was learned from prompts
        (`StoreConfig.learn`) is forgotten with it, as it may have the same words.

        Returns:
            How many KVs were deleted; a chunk that was encoded behind two prefixes has two.

        Raises:
            ConfigError: `texts` is a single string.
            StoreError: the files cannot be opened or written, so KV would stay there.
        """
        self.check_open()
        texts = several(texts)
        records = self._encoder.records_of(texts)
        self.library.refresh()
        return self.library.remove({digest(text.strip()) for text in texts}, records)

    def hold(
        self,
        texts: Iterable[str],
        *,
        pinned: bool | None = None,
        ttl_seconds: float | None = None,
    ) -> int:
        """Say how long the KV of texts is kept that there is now, after `encode`.

        Args:
            pinned: whether it stays when others need room. Pins take half of a bound at most.
            ttl_seconds: so long from now on; then it is used no more, and deleted with the next KV
                that is kept. `math.inf` for never. If a prompt has the text later, it is encoded
                anew. What prompts with it left (`sequence_bytes`) serves on: see `forget`.

        Returns:
            How many KVs these are; a chunk that was encoded behind two prefixes has two.

        Raises:
            ConfigError: `texts` is a single string, the time is not positive, or there is a remote
                store, which would not learn of it.
            StoreFullError: pins would take more than half.
            StoreError: the files cannot be opened or written.
        """
        self.check_open()
        self.library.refresh()
        until = until_when(ttl_seconds)
        return self.library.hold(self._encoder.records_of(texts), pinned=pinned, until=until)

    def _let_go(self, chunks: Sequence[ChunkRecord]) -> None:
        """Use no more KV of removed chunks that is outside the library: in what prompts left."""
        self._encoder.let_go()
        self.library.handed_over.forget({chunk.text_digest for chunk in chunks})
        for chunk in chunks:
            ids = inner_ids(chunk.token_ids)
            self.scheduler.forget(self.settings.namespace, chunk.text_digest, ids)

    def head(self, messages: Sequence[Message], before: str) -> Rendered:
        """What a chat prompt says before a text, to be used as the prefix of `encode`.

        Args:
            messages: the chat prompt.
            before: a text in it; the head ends where this text begins for the first time.

        Raises:
            ConfigError: `before` does not occur in the rendered messages.
        """
        rendered = self.tokenization.template.render(messages)
        at = rendered.text.find(before)
        if at < 0:
            raise ConfigError(f"the rendered messages do not contain {before!r}")
        return rendered.until(at)

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
        asked = Prefilling(AskedPrompt(self._resources, planner, config, clock))
        return Stream(self.scheduler, Request(asked, tenant))

    def prefill(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Prefilling:
        """Prefill a prompt up to the logits of its first answer token. Errors as `generate`.

        Returns:
            What came of it, with the prompt's `buffer` and `logits`. Call its `release` when you
            are done with it: the next prompt uses the same memory.
        """
        config = (config or GenerationConfig()).replace(**options)
        self.check_open()
        begun = Prefilling(AskedPrompt(self._resources, self._planner(prompt), config))
        prefill.read(begun)
        return on_model_thread(lambda: prefill.alone(begun))

    def prompt_kv(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> tuple[list[int], ModuleKV, Report]:
        """Prefill a prompt for another program to answer. Errors as `generate`.

        Returns:
            Its tokens; a copy of the KV of all of them but the last, from position 0 on, empty
            where there is only one; and what was reused.
        """

        def copied() -> ModuleKV:
            try:
                return request.kv.own.read(0, len(ids) - 1, tuple(ids[:-1]))
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

        plan = partial(reading, report, lazy=self.library.is_pipelined)
        return exclusively(self.model, plan)

    def count_tokens(self, prompt: Prompt) -> int:
        """The number of a prompt's tokens, those of the chat template among them."""
        if isinstance(prompt, Planned) and not self.model.keeps_states:
            return prompt.count_tokens(self)
        return len(self.tokenization.tokenize(self._rendered(prompt)))

    def _planner(self, prompt: Prompt) -> Planner:
        if isinstance(prompt, Planned):
            if not self.model.keeps_states:
                return prompt.planner(self)
            prompt.count_tokens(self)  # which refuses what is too long for its place
        return TextPlanner(self._resources, self._rendered(prompt))

    def _rendered(self, prompt: Prompt) -> Rendered:
        if isinstance(prompt, Planned):
            plain = prompt.plain()  # of which nothing is a control token
            prompt = Rendered(plain, ((0, len(plain)),)) if isinstance(plain, str) else plain
        return prompt if isinstance(prompt, Rendered) else self.tokenization.template.render(prompt)


def _after_fork() -> None:
    """Close all engines in a forked child: it has not their threads, and locks may stay held."""
    global _SHARING
    _SHARING = threading.Lock()
    _SHARED.clear()
    for engine in list(_OPEN):
        engine._is_closed = True
        engine.scheduler.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
