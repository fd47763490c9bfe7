"""What every engine is made of, and what it does with texts: it encodes and forgets them.

Here the parts are joined: the library of chunks, the scheduler of requests, the model. How prompts
are answered stands in `engine.py`. Knows no documents and no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

from cached_rag.backends.base import Backend
from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import BatchConfig, StoreConfig
from cached_rag.engine.audit import Audits
from cached_rag.engine.planner import Planner
from cached_rag.engine.resources import Resources, completed, refuses, sizes_of
from cached_rag.engine.scheduler import Scheduler
from cached_rag.errors import ClosedError, ConfigError
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store import ChunkRecord, Maker
from cached_rag.kv.store.remote import RemoteTier, open_remote
from cached_rag.library.background import WriteBack
from cached_rag.library.context import Context, primer
from cached_rag.library.encode import EncodeSummary
from cached_rag.library.encoder import Encoder, check_several
from cached_rag.library.library import Library
from cached_rag.library.matching import inner_ids
from cached_rag.library.sequences import Sequences


@runtime_checkable
class Planned(Protocol):
    """A prompt that decides itself which of its tokens come from which KV, as PML prompts do."""

    def planner(self, engine: BaseEngine) -> Planner:
        """What finds the prompt's tokens and makes its plan, when the engine asks for them."""
        ...

    def count_tokens(self, engine: BaseEngine) -> int:
        """The number of its tokens."""
        ...

    def plain(self) -> str | Sequence[Message]:
        """The same prompt as ordinary text, or as chat messages."""
        ...


Prompt = str | Sequence[Message] | Rendered | Planned


class BaseEngine:
    """A model, and the texts that it has encoded."""

    def __init__(
        self,
        model: Backend,
        store: StoreConfig | None = None,
        batch: BatchConfig | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        beside: BaseEngine | None = None,
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
        """
        self.model = model
        self._is_closed = False
        self.settings = settings = completed(store or StoreConfig(), model.shapes.device)
        maker = Maker(model.fingerprint, model.name, str(model.shapes.dtype).removeprefix("torch."))
        self._remote: RemoteTier | None = (
            beside._remote if beside else open_remote(settings, sizes_of(model))
        )
        self.library: Library = Library(
            settings,
            maker,
            model.shapes.device,
            beside.library if beside else None,
            forgotten=self._let_go,
            remote=self._remote,
            refuses=refuses(model, self._remote),
        )
        self.tokenization = Tokenization(model.tokenizer, chat_template_kwargs)
        self.lock = model.lock
        self._encoder = Encoder(model, self.library, self.tokenization)
        shared = beside._resources if beside else None
        self._resources: Resources = Resources.of(
            model, self.tokenization, self.library, self._encoder, settings, shared
        )
        self._owns_scheduler = beside is None
        self.scheduler: Scheduler = (
            beside.scheduler if beside else Scheduler(model, batch or BatchConfig())
        )

    @property
    def sequences(self) -> Sequences:
        """KV that finished prompts left, of all tenants."""
        return self._resources.sequences

    @property
    def audits(self) -> Audits:
        """How far answers begin as full prefill's would; see `StoreConfig.audit_rate`."""
        return self._resources.audits

    @property
    def write_back(self) -> WriteBack | None:
        """The thread that encodes what requests missed; None if it is switched off."""
        return self._resources.learning.write_back

    def check_open(self) -> None:
        """Check that the engine was not closed.

        Raises:
            ClosedError: it was.
        """
        if self._is_closed:
            raise ClosedError(
                f"this engine ({self.model.name}) was closed; make another one (Engine.load, "
                "Engine.shared, CachedRAG.open), and close it only when it is not asked any more"
            )

    def encode(
        self,
        texts: Sequence[str | Sequence[str]],
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

        def exclusively(work: Callable[[], None]) -> None:
            def locked() -> None:
                with self.lock:
                    work()

            on_model_thread(locked)

        summary = self._encoder.encode(order, exclusively, done, token_total)
        if self._remote is None:
            return summary
        return replace(summary, unsent=self._remote.drain())

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

    def register(self, texts: Sequence[str]) -> int:
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

    def prefetch(self, texts: Sequence[str], *, in_parts: bool = False) -> None:
        """Begin to read the KV of texts from disk, because a prompt with them will follow.

        A text that is not in that prompt as it is here is looked for in parts, and the report says
        so.

        Args:
            in_parts: the prompt will have parts of them only, so that reports need not say it.
        """
        self.check_open()
        check_several(texts)
        self.library.handed_over.add(texts, in_parts=in_parts)
        self.library.prefetch(texts)

    def forget(self, texts: Sequence[str]) -> int:
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
        records = self._encoder.records_of(texts)
        if self._resources.learning.recurring is not None:
            self._resources.learning.recurring.clear()
        self.library.refresh()
        return self.library.remove({digest(text.strip()) for text in texts}, records)

    def _let_go(self, chunks: Sequence[ChunkRecord]) -> None:
        """Drop all KV of removed chunks that is outside the library: in what prompts left."""
        self._encoder.let_go()
        self.library.handed_over.forget({chunk.text_digest for chunk in chunks})
        for chunk in chunks:
            namespace, ids = self.settings.namespace, inner_ids(chunk)
            self.scheduler.forget(self.sequences, namespace, chunk.text_digest, ids)

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

    def _rendered(self, prompt: Prompt) -> Rendered:
        if isinstance(prompt, Planned):
            prompt = prompt.plain()
        return prompt if isinstance(prompt, Rendered) else self.tokenization.template.render(prompt)
