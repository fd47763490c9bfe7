"""Documents in, answers out: a folder's index joined with the engine.

How documents come in stands in `folder.py`. Says what happens in which order; each step is somebody
else's. Imports no framework.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Message
from cached_rag.config import BatchConfig, GenerationConfig, KeepsRepaired, Learns, StoreConfig
from cached_rag.errors import (
    ConfigError,
    needs_extra,
)
from cached_rag.rag.answer import Answer, AnswerStream, conversation
from cached_rag.rag.asking import Asking
from cached_rag.rag.chat import Chat, resumed
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.filters import Where
from cached_rag.rag.folder import IndexFolder
from cached_rag.rag.hit import Hit
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.prompts import Prompts, searched
from cached_rag.rag.retrieval import Reranker, Retrieval, cross_encoder, find
from cached_rag.rag.roots import absolute, is_path
from cached_rag.rag.settings import asked_for

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine

# What `[rag]` brings, for the index, embeddings and readers.
_MODULES = (
    *("faiss", "sentence_transformers", "charset_normalizer", "docutils"),
    *("markdown_it", "pypdf"),
)


class CachedRAG(IndexFolder):
    """A folder of documents that can be asked. Models load when first needed."""

    _reranker: Reranker | None = None
    _candidates: int = 24

    @classmethod
    @needs_extra("rag", "an index of documents", *_MODULES)
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        embedding: str | Embeddings | None = None,
        chunk_tokens: int | None = None,
        codec: str | None = None,
        context: str | None = None,
        system: str | None = None,
        search: str | None = None,
        memory_bytes: int = 2 << 30,
        disk_bytes: int | None = None,
        remote: str | None = None,
        signing_key: str | None = None,
        sequence_bytes: int | None = None,
        keeps_repaired: KeepsRepaired = "conversation",
        learn: Learns = "off",
        audit_rate: float = 0.0,
        finish_seconds: float = 30.0,
        engine: Engine | None = None,
        batch: BatchConfig | None = None,
        dtype: str | None = None,
        device: str | None = None,
        weights: str | None = None,
        backend: str | None = None,
        revision: str | None = None,
        adapter: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reranker: Reranker | str | None = None,
        candidates: int = 24,
        limits: DocumentLimits | None = None,
    ) -> CachedRAG:
        """Open an index folder, or make one.

        The settings of an index are those that its first document was ingested with. An index
        without documents has none: each `open` may choose anew.

        Args:
            model: alias, hub id, folder or GGUF file. This and the next six are the index's
                settings; None takes what the index has, or the default.
            embedding: a sentence-transformers name, or an object that embeds.
            chunk_tokens: most tokens of a chunk, counted by the model's tokenizer.
            codec: how KV is kept on disk, "raw" or "int8".
            context: what chunks are encoded behind, besides the prompt's head: "primer" (some
                neutral text), "none", "both" of these (the first chunk of a prompt is exact then;
                the default), "primer:3" or "both:3" (the mean behind three such texts, in three
                passes instead of one). "both" takes a pass more, and twice the disk; see
                docs/methods.md.
            system: the system prompt that questions are asked under; empty for none.
            search: how chunks are found: by "vectors" (what is meant; the default), by "words"
                (BM25: part numbers, names), or "hybrid" by both. Each `open` may
                choose anew; the first ingestion's is remembered.
            memory_bytes, disk_bytes: most bytes of KV in memory and on disk.
            remote: a store that several machines share; see `StoreConfig`.
            signing_key: KV that is not signed with it is not used; see `StoreConfig`.
            sequence_bytes, keeps_repaired: KV of finished prompts that is kept for prompts that
                begin alike, above all a conversation's next turn; see `StoreConfig`.
            learn: "recurring" for texts in prompts that are not the index's; see `StoreConfig`.
            audit_rate: share of the answers that are compared with full prefill; see `StoreConfig`.
            finish_seconds: how long `close` may go on encoding what waits, see `StoreConfig`.
            engine: one that exists already, instead of loading `model`; it keeps its own store.
            batch: bounds on answers made at the same time.
            backend: what runs the model: "transformers", or "llama.cpp" for a GGUF. This, dtype,
                weights, revision and adapter are remembered, too; another than the index's is taken
                and logged, as it has KV of its own.
            dtype, device, weights: see `load_model`.
            revision, adapter, model_kwargs, chat_template_kwargs: see `Engine.load`.
            reranker: puts the nearest chunks into a better order, of which the first k are used: a
                cross-encoder's hub id or folder; or a function that is called with the question
                and their texts, and gives a number for each, the higher the better.
            candidates: how many chunks the reranker is given.
            limits: on the size of a document, and the time and memory for reading it.

        Raises:
            IndexMismatchError: the index was made with other settings.
            ConfigError: a bad setting.
            MissingPackageError: the packages of `[rag]` are not installed.
        """
        settings = asked_for(
            model=engine.model.name if engine else model,
            embedding=getattr(embedding, "name", embedding),
            chunk_tokens=chunk_tokens,
            codec=codec,
            context=context,
            system=system,
            search=search,
            backend=backend,
            dtype=dtype,
            weights=weights,
            revision=revision,
            adapter=adapter,
        )
        if not is_path(Path(path).expanduser()):
            raise ConfigError(f"{str(path)!r} cannot be the name of an index; give another one")
        root = absolute(path)  # the process may change its folder, and the index stays
        if os.path.isfile(root):  # unlike `is_file`, also of a name that is too long
            raise ConfigError(f"{root} is a file, and an index is a folder; give another path")
        store = StoreConfig(
            path=str(root / "kv"),
            codec=codec or "raw",
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            remote=remote,
            signing_key=signing_key,
            sequence_bytes=sequence_bytes,
            keeps_repaired=keeps_repaired,
            learn=learn,
            audit_rate=audit_rate,
            finish_seconds=finish_seconds,
        )
        options: dict[str, Any] = {"device": device, "batch": batch, "model_kwargs": model_kwargs}
        options["chat_template_kwargs"] = chat_template_kwargs
        embedder = None if isinstance(embedding, str) else embedding
        rag = cls(root, settings, store, options, embedder, engine, limits)
        scored = cross_encoder(reranker, device) if isinstance(reranker, str) else reranker
        rag._reranker, rag._candidates = scored, candidates
        return rag

    def __enter__(self) -> CachedRAG:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        k: int = 6,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        where: Where | None = None,
        answer_anyway: bool = False,
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> Answer:
        """Answer a question from the k nearest chunks.

        Args:
            history: what was said before, in order: answers of this index, or messages of the user
                and the assistant. The model reads all of it; chunks are searched for with the last
                two questions and this one.
            k: how many chunks, 1 to 100; those that fit the model's context are used.
            min_score: leave out chunks whose cosine similarity (-1 to 1) is less; None uses all k.
                `report.notes` says where none is left, or the nearest one has less than 0.25.
            where: which chunks may be used, by their source, title, ordinal, or metadata such as
                page and heading: `{"source": "docs/guide/*", "page": range(3, 9)}`, or a function
                of a `Hit`; see `filters.judge`.
            answer_anyway: let the model answer where no chunk is left. Else the answer says that
                nothing was found, and the model is not asked.
            config: how to answer; None for the defaults.
            reorder: let chunks begin in an order that an earlier prompt had, so that its KV serves
                again (where it was repaired, only with `keeps_repaired=True`); changes the prompt,
                and with it maybe the answer.
            options: settings of `GenerationConfig`, in place of those in `config`.

        Raises:
            ConfigError: an empty index, an empty question, or a bad setting or history.
            ContextOverflowError: question and history alone do not fit the model's context.
        """
        stream = self.stream(
            question,
            k=k,
            history=history,
            min_score=min_score,
            where=where,
            answer_anyway=answer_anyway,
            config=config,
            reorder=reorder,
            **options,
        )
        for _ in stream:
            pass
        return stream.answer

    def ask_many(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """Answer several questions together, in one batch; each answer is the one of `ask`.

        Args:
            options: those of `ask`, for all of them.

        Raises:
            ConfigError: `questions` is a single string.
            As `ask`, for the first question that fails. The others are then stopped.
        """
        if isinstance(questions, str):
            raise ConfigError("questions are several; give a single one as a list, [question]")
        streams: list[AnswerStream] = []
        try:
            streams.extend(self.stream(question, **options) for question in questions)
            for stream in streams:
                stream.stream.start()
            for stream in streams:
                for _ in stream:
                    pass
            return [stream.answer for stream in streams]
        finally:
            for stream in streams:
                stream.stream.cancel()

    def stream(
        self,
        question: str,
        *,
        k: int = 6,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        where: Where | None = None,
        answer_anyway: bool = False,
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece."""
        config = (config or GenerationConfig()).replace(**options)
        wanted = Retrieval(k, min_score, where, answer_anyway)
        said = conversation(history)
        return self._asking().answer(question, said, wanted, config, reorder=reorder)

    def chat(
        self,
        *,
        k: int = 6,
        min_score: float | None = None,
        where: Where | None = None,
        answer_anyway: bool = False,
        config: GenerationConfig | None = None,
        condense: bool = True,
        history: Sequence[Answer | Message] = (),
        **options: Any,
    ) -> Chat:
        """Begin a conversation. Its turns answer faster than `ask` with a history does.

        Each question's chunks stay where they were found, and those the conversation has already
        are not given again: so each prompt begins with the whole one before it, whose KV is kept.

        Args:
            k, min_score, where, answer_anyway, config, options: see `ask`. Chunks that the
                conversation has already are enough to answer from.
            condense: let the model rewrite a follow-up question for the search; else it is searched
                with the last two questions before it.
            history: a conversation to go on with: its `Chat.messages` or `Chat.history`, or other
                questions and answers in turn.

        Raises:
            ConfigError: a bad setting or history.
        """
        config = (config or GenerationConfig()).replace(**options)
        wanted, said = Retrieval(k, min_score, where, answer_anyway), resumed(history)
        return Chat(self._asking, wanted, config, condense=condense, said=said)

    @property
    def _prompts(self) -> Prompts:
        return Prompts(self.engine, self.settings["system"])

    def _asking(self) -> Asking:
        """What questions are answered with, after what other processes may have changed."""
        self._agree()
        return Asking(
            self.index,
            self.engine,
            self.embedder,
            self._prompts,
            self._contexts,
            self._forget_later,
            self._reranker,
            self._candidates,
            self.settings["search"],
        )

    async def aask(self, question: str, **options: Any) -> Answer:
        """As `ask`, without blocking the event loop; a cancelled task stops the generation."""
        stream = await self.astream(question, **options)
        await stream.atext()
        return stream.answer

    async def astream(self, question: str, **options: Any) -> AnswerStream:
        """As `stream`, for an asynchronous loop; the search runs in a thread of its own.

        Example:
            async for piece in await rag.astream("How is the valve reset?"):
                print(piece, end="")
        """
        return await asyncio.to_thread(self.stream, question, **options)

    def search(
        self,
        question: str,
        k: int = 6,
        *,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        where: Where | None = None,
    ) -> list[Hit]:
        """The k chunks nearest to a question, best first.

        Args:
            history, min_score, where: see `ask`.

        Raises:
            ConfigError: an empty index or question, or a bad k, min_score, history or filter.
        """
        self._agree()
        text = searched(question, conversation(history))
        wanted = Retrieval(k, min_score, where)
        order = (self._reranker, self._candidates, self.settings["search"])
        found = find(self.index, self.embedder, text, wanted, *order)
        return list(found.hits)
