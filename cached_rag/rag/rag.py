"""Documents in, answers out: a folder's index joined with the engine.

Says what happens in which order; each step is somebody else's. Imports no framework.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cached_rag.backends.tokenizer import Message
from cached_rag.config import BatchConfig, GenerationConfig, KeepsRepaired, Learns, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import (
    ConfigError,
    DocumentError,
    IndexMismatchError,
    StoreError,
    needs_extra,
)
from cached_rag.kv.store.holdings import forget
from cached_rag.kv.store.remote import open_remote
from cached_rag.library.context import Context
from cached_rag.rag.answer import Answer, AnswerStream, conversation
from cached_rag.rag.asking import Asking
from cached_rag.rag.chat import Chat
from cached_rag.rag.document import assembled
from cached_rag.rag.embedding import Embedder, Embeddings
from cached_rag.rag.filters import Where, described
from cached_rag.rag.hit import Hit
from cached_rag.rag.index import DocumentIndex, IndexedDocument
from cached_rag.rag.ingest import Ingestion, IngestSummary
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.preparing import Preparation
from cached_rag.rag.prompts import Prompts, searched
from cached_rag.rag.retrieval import Reranker, Wanted, find
from cached_rag.rag.roots import absolute, is_path
from cached_rag.rag.settings import DEFAULTS, asked_for, contexts
from cached_rag.rag.watch import watch
from cached_rag.rag.workers import IngestWorkers, Prepare, helped

_log = logging.getLogger(__name__)
# What `[rag]` brings, for the index, embeddings and readers.
_MODULES = (
    *("faiss", "sentence_transformers", "charset_normalizer", "docutils", "inscriptis"),
    *("markdown_it", "pypdf"),
)


@dataclass(frozen=True)
class Deletion:
    """A deleted document: its source, and how many chunks and chunks' KVs went with it."""

    source: str
    chunks: int
    kvs: int


class CachedRAG:
    """A folder of documents that can be asked. Models load when first needed."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, str],
        store: StoreConfig,
        engine_options: dict[str, Any],
        embedder: Embeddings | None,
        engine: Engine | None = None,
        reranker: Reranker | None = None,
        candidates: int = 24,
        limits: DocumentLimits | None = None,
    ) -> None:
        """See `open`.

        Args:
            settings: those that were asked for; the index's, or the defaults, are the others.
            engine_options: for `Engine.load`.
        """
        self.path = path
        self.index = DocumentIndex(path / "documents.sqlite")
        self._asked, self._store, self._engine_options = settings, store, engine_options
        self._engine, self._embedder = engine, embedder
        self._reranker, self._candidates = reranker, candidates
        self._limits = limits or DocumentLimits()
        self._remote = open_remote(store)
        self._loading = threading.Lock()  # several threads may be the first to ask
        try:
            self._agree()
        except IndexMismatchError:
            self.index.close()
            raise
        self._forget_later(self.index.unneeded())  # deletions that nobody finished

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
        weights: str = "as stored",
        backend: str = "transformers",
        revision: str | None = None,
        adapter: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
        candidates: int = 24,
        limits: DocumentLimits | None = None,
    ) -> CachedRAG:
        """Open an index folder, or make one.

        The settings of an index are those that its first document was ingested with. An index
        without documents has none: each `open` may choose anew.

        Args:
            model: alias, hub id, folder or GGUF file. This and the next five are the index's
                settings; None takes what the index has, or the default.
            embedding: a sentence-transformers name, or an object that embeds.
            chunk_tokens: most tokens of a chunk, counted by the model's tokenizer.
            codec: how KV is kept on disk, "raw" or "int8".
            context: what chunks are encoded behind, besides the prompt's head: "primer" (some
                neutral text), "none", "both" of these (the first chunk of a prompt is exact then;
                the default), "primer:3" (the mean behind three such texts, in three passes), or
                "neighbours:n" (nothing, and the n nearest chunks). "both" and "neighbours:n" take
                two passes and twice the disk; see docs/methods.md.
            system: the system prompt that questions are asked under.
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
            dtype, device, weights: see `load_model`.
            backend: what runs the model: "transformers", or "llama.cpp" for a GGUF.
            revision, adapter, model_kwargs, chat_template_kwargs: see `Engine.load`.
            reranker: puts the nearest chunks into a better order, of which the first k are used:
                called with the question and their texts, it gives a number for each, the higher
                the better, as `lambda question, texts: encoder.predict([(question, t) for t in
                texts])` with a `sentence_transformers.CrossEncoder`.
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
        )
        root = Path(path).expanduser()
        if not is_path(root):
            raise ConfigError(f"{str(path)!r} cannot be the name of an index; give another one")
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
        options: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
        options |= {"batch": batch, "backend": backend, "revision": revision, "adapter": adapter}
        options |= {"model_kwargs": model_kwargs, "chat_template_kwargs": chat_template_kwargs}
        embedder = None if isinstance(embedding, str) else embedding
        return cls(root, settings, store, options, embedder, engine, reranker, candidates, limits)

    def _agree(self) -> None:
        """Take over the settings of the index, to which another process may have given some."""
        self.settings = DEFAULTS | self._asked | self.index.agree(self._asked)

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        with self._loading:
            if self._engine is None:
                self._agree()
                store = replace(self._store, codec=self.settings["codec"])
                model = self.settings["model"]
                self._engine = Engine.load(model, store=store, **self._engine_options)
                self._asked = self.settings  # from now on no others will do
            return self._engine

    @property
    def _prompts(self) -> Prompts:
        return Prompts(self.engine, self.settings["system"])

    @property
    def embedder(self) -> Embeddings:
        """The embedding model, loaded on first use."""
        with self._loading:
            if self._embedder is None:
                self._agree()
                embedder = Embedder(self.settings["embedding"])
                embedder.load()
                self._embedder = embedder
                self._asked = self.settings
            return self._embedder

    def close(self) -> None:
        """Finish what waits in the background, see `Engine.close`, and release files.

        Whatever is asked of it later raises `ClosedError`.
        """
        self.index.close()
        if self._engine is not None:
            self._engine.close()
        if self._remote is not None:
            self._remote.close(0)

    def __enter__(self) -> CachedRAG:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Ingestion -------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Mapping[str, str],
        *,
        metadata: Mapping[str, str | int | float | bool] | None = None,
        progress: bool = True,
    ) -> IngestSummary:
        """Bring texts into the index that are in no file, and prefill their chunks.

        Args:
            texts: each under the name of its document ("faq/12"); a document of that name is
                replaced, and `delete` takes it.
            metadata: what is known of all of them, to filter by.
            progress: show a bar on the terminal.

        Raises:
            DocumentError: a text is empty, or its name cannot be one; then none is added.
            ConfigError: metadata that is no string or number.
            IndexMismatchError, StoreFullError: see `ingest`.
        """
        known = described(metadata or {})
        documents = [assembled(name, [(text, known)]) for name, text in texts.items()]
        for one in documents:
            self.index.roots.check_free(one.source)
            if not one.text:
                raise DocumentError(f"the text {one.source!r} is empty; leave it out")
        return self._ingestion().add(documents, progress=progress)

    def ingest(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        delete_missing: bool = False,
        ray: str | IngestWorkers | None = None,
        progress: bool = True,
    ) -> IngestSummary:
        """Bring a file, or all files below a folder, into the index, and prefill their chunks.

        Doing it again costs little: unchanged documents are kept, changed ones replace their old
        chunks and KV, and an interrupted run goes on where it stopped.

        A document is named after its place in the folder, with the folder's name before it
        ("docs/guide/a.md"), a single file after itself: however the path was spelled, and wherever
        the folder is moved. A path inside a folder that was ingested belongs to that folder.

        Args:
            name: what to call the folder or file, instead of its own name. Documents that had
                this name before are replaced, wherever they came from.
            delete_missing: delete documents that were ingested from below `path` and are gone.
            ray: have the work done on a Ray cluster (extra `ray`, docs/scale.md): its address,
                "local" for processes of this machine, or a `ray_cached_rag.RayConfig`.
            progress: show bars on the terminal.

        Raises:
            DocumentError: nothing is at `path`; or the index has another folder or file of that
                name: one that is still where it was, or that has no document in common with this
                one. Unreadable files are no error: `IngestSummary.skipped` names them.
            IndexMismatchError: another process made the index with other settings meanwhile.
            StoreFullError: the disk is full; what was ingested before is kept.
            ClusterError: the cluster cannot be reached, or its workers failed.
            ConfigError: workers cannot do it by the settings of this index.
            MissingPackageError: Ray is not installed.
        """
        ingestion, place = self._ingestion(), absolute(path)
        hired: AbstractContextManager[Prepare | None] = nullcontext()
        if ray is not None:
            own = (ingestion.preparation, self.settings, self._engine_options)
            hired = helped(ray, *own, folder=self.path, documents=place, limits=self._limits)
        with hired as prepare:
            return ingestion.run(
                place,
                name=name,
                delete_missing=delete_missing,
                progress=progress,
                prepare=prepare,
            )

    def watch(
        self, path: str | Path, *, progress: bool = False, stop: threading.Event | None = None
    ) -> Iterator[IngestSummary]:
        """Ingest a folder and keep in step with it: what is added, changed or deleted there.

        Args:
            stop: ends the iteration when it is set; without it, it goes on until interrupted.

        Yields:
            What was done, at once and whenever something has changed.

        Raises:
            DocumentError: there is no such folder, or it is gone.
            MissingPackageError: watchfiles, of the extra "docs", is not installed.
        """
        return watch(
            absolute(path),
            lambda part, whole: self.ingest(part, delete_missing=whole, progress=progress),
            ignored=self.path,
            stop=stop,
        )

    def _ingestion(self) -> Ingestion:
        self._agree()
        preparation = Preparation.of(self.engine, self.embedder, self.settings, self._contexts())
        forget, limits = self._forget_later, self._limits
        return Ingestion(self.index, preparation, self.settings, forget, limits)

    def documents(self) -> list[IndexedDocument]:
        """All documents of the index, by source."""
        return self.index.documents()

    def delete(self, source: str | Path) -> Deletion:
        """Delete a document, its chunks, and the KV that no other document needs. Loads no model.

        Args:
            source: its name, as `documents` has it, or its path on disk.

        Raises:
            DocumentError: there is no such document, or the path stands for several.
        """
        found = self.index.roots.find(source)
        chunks = len(self.index.texts(found))
        return Deletion(found, chunks, self._forget(self.index.delete(found)))

    def _forget_later(self, texts: Sequence[str]) -> None:
        """As `_forget`; what the remote store does not delete now, the next `open` does."""
        try:
            self._forget(texts)
        except StoreError as error:
            if self._remote is None:
                raise
            _log.warning("%s", error)

    def _forget(self, texts: Sequence[str]) -> int:
        """Delete the KV of texts, by whatever model and in whatever codec; says how many went."""
        if not texts:
            return 0
        gone = 0 if self._engine is None else self._engine.forget(texts)
        gone += forget(self.path / "kv", self.settings["codec"], texts, self._remote)
        self.index.forgotten(texts)
        return gone

    # Questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        k: int = 6,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        where: Where | None = None,
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> Answer:
        """Answer a question from the k nearest chunks.

        Args:
            history: what was said before, in order: answers of this index, or messages of the user
                and the assistant. The model reads all of it; chunks are searched for with the last
                two questions and this one.
            min_score: leave out chunks whose cosine similarity is less; None uses all k. Where none
                is left, the model answers without, and `report.notes` says so. They also say where
                the nearest chunk has less than 0.25.
            where: which chunks may be used, by their source, title, ordinal, or metadata such as
                page and heading: `{"source": "docs/guide/*", "page": range(3, 9)}`, or a function
                of a `Hit`; see `filters.judge`. Where none fits, the model answers without.
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
            config=config,
            reorder=reorder,
            **options,
        )
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        k: int = 6,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        where: Where | None = None,
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece."""
        config = (config or GenerationConfig()).replace(**options)
        wanted = Wanted(k, min_score, where)
        said = conversation(history)
        return self._asking().answer(question, said, wanted, config, reorder=reorder)

    def chat(
        self,
        *,
        k: int = 6,
        min_score: float | None = None,
        where: Where | None = None,
        config: GenerationConfig | None = None,
        condense: bool = True,
        **options: Any,
    ) -> Chat:
        """Begin a conversation. Its turns answer faster than `ask` with a history does.

        Each question's chunks stay where they were found, and those the conversation has already
        are not given again: so each prompt begins with the whole one before it, whose KV is kept.

        Args:
            k, min_score, where, config, options: see `ask`.
            condense: let the model rewrite a follow-up question for the search; else it is searched
                with the last two questions before it.
        """
        config = (config or GenerationConfig()).replace(**options)
        return Chat(self._asking, Wanted(k, min_score, where), config, condense=condense)

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
            ConfigError: an empty index or question, k < 1, or a bad history or filter.
        """
        self._agree()
        text = searched(question, conversation(history))
        wanted = Wanted(k, min_score, where)
        found = find(self.index, self.embedder, text, wanted, self._reranker, self._candidates)
        return list(found.hits)

    def _contexts(self) -> tuple[Context | None, ...]:
        return contexts(self.settings["context"], self.index, self.embedder)
