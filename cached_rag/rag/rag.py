"""Documents in, answers out: a folder's index joined with the engine.

Says what happens in which order; each step is somebody else's. Imports no framework.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Message
from cached_rag.backends.resolve import resolve, whole_path
from cached_rag.config import BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError, StoreError, needs_extra
from cached_rag.options import parted, require
from cached_rag.rag.answer import Answer, AnswerStream, conversation, resumed, searched
from cached_rag.rag.asking import Asking, Chat, agree, check_question, find
from cached_rag.rag.chunks import Embeddings, cross_encoder
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.finding import absolute, is_folder, is_path
from cached_rag.rag.folder import IndexConfig, IndexFolder, Reranking, Retrieval, as_kept
from cached_rag.rag.index import IndexedDocument
from cached_rag.rag.ingest import Ingestion, watch
from cached_rag.rag.progress import IngestSummary, Shown
from cached_rag.rag.search import Hit
from cached_rag.rag.workers import IngestWorkers, helped

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine

# What `[rag]` brings, for the index, embeddings and readers.
_MODULES = (
    *("faiss", "sentence_transformers", "chardet", "docutils"),
    *("markdown_it", "lxml", "pypdf"),
)
# What `CachedRAG.open` takes by name.
SETTINGS = (IndexConfig, Reranking, ModelConfig, StoreConfig, BatchConfig, DocumentLimits)
# What of a model is not the index's to remember, as it is the machine's or the application's.
_THE_MACHINES = ("device", "model_kwargs", "chat_template_kwargs")
_NOT_OF_AN_INDEX = ("path", "namespace")
# Settings of a store that an index has for itself, whichever engine it is given.
_THE_INDEXES = ("primers", "first_exact")


@dataclass(frozen=True)
class Deletion:
    """A deleted document: its source, and how many chunks and chunks' KVs went with it."""

    source: str
    chunks: int
    kvs: int


class CachedRAG:
    """A folder of documents that can be asked. Models load when first needed.

    Attributes:
        path: the index's folder.
        index: the documents and their chunks, without models.
    """

    def __init__(self, folder: IndexFolder, limits: DocumentLimits, reranking: Reranking) -> None:
        """See `open`."""
        self._folder, self._limits, self._reranking = folder, limits, reranking
        self.path, self.index = folder.path, folder.index

    @classmethod
    @needs_extra("rag", "an index of documents", *_MODULES)
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        embedding: str | Path | Embeddings | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> CachedRAG:
        """Open an index folder, or make one.

        An index keeps the settings that its first document was ingested with: its model, those of
        `IndexConfig`, and of `ModelConfig` backend, dtype, weights, revision and adapter; of the
        latter another one is taken and logged, as it has KV of its own. An index without documents
        has none: each `open` may choose anew.

        Args:
            model: alias, hub id, folder or GGUF file; None takes what the index has, or the
                default.
            embedding: a sentence-transformers name or folder, or an object that embeds.
            engine: one that exists already, instead of loading `model`. It has settings of its own
                for model, store and batch, so none of those may be given; and `close` leaves it
                open, as others may use it.
            options: settings by name, of `IndexConfig` (such as `search` and `primers`),
                `Reranking`, `ModelConfig`, `StoreConfig`, `BatchConfig` and `DocumentLimits`.

        Raises:
            IndexMismatchError: the index was made with other settings.
            ModelNotFoundError: `model` is a path, or nearly an alias, and nothing is there.
            ConfigError: a setting that is unknown, bad, or cannot apply.
            MissingPackageError: the packages of `[rag]` are not installed.
        """
        if isinstance(embedding, str | os.PathLike):
            embedding = whole_path(os.fspath(embedding))
        if embedding is not None:
            options["embedding"] = getattr(embedding, "name", embedding)
        if options.get("adapter"):
            options["adapter"] = whole_path(options["adapter"])
        index, ranking, how, store, batch, limits = parted(
            options, *SETTINGS, beside=("model", "engine")
        )
        store = {name: given for name, given in store.items() if name not in _THE_INDEXES}
        _check_that_apply(model, engine, [*_given(how | store | batch)], store)
        if model is not None:
            model = whole_path(str(model))
            resolve(model)  # before documents are read for it
        reranking, reading = Reranking(**ranking), DocumentLimits(**limits)
        root = _folder(path)
        how, index = _given(how), _given(index)
        loading = vars(ModelConfig(**how))
        known = {**vars(IndexConfig(**index)), **loading}
        asked = {name: known[name] for name in [*index, *how] if name not in _THE_MACHINES}
        if engine or model:
            asked["model"] = whole_path(engine.model.name) if engine else model
        options = {name: loading[name] for name in _THE_MACHINES}
        options["batch"] = BatchConfig(**batch)
        folder = IndexFolder(
            root,
            as_kept(asked),
            StoreConfig(path=str(root / "kv"), **{"codec": "raw", **_given(store)}),
            options,
            engine,
            None if isinstance(embedding, str) else embedding,
        )
        if isinstance(name := reranking.reranker, str):
            reranking = replace(reranking, reranker=cross_encoder(name, loading["device"]))
        return cls(folder, reading, reranking)

    @property
    def settings(self) -> dict[str, str]:
        """The index's settings; while it has no document, those that were asked for."""
        return self._folder.settings

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        return self._folder.engine

    @property
    def loaded(self) -> Engine | None:
        """The engine, if it was given or is loaded already."""
        return self._folder.loaded

    @property
    def embedder(self) -> Embeddings:
        """The embedding model, loaded on first use; the index has its vectors from then on."""
        return self._folder.embedder

    def close(self) -> None:
        """Finish what waits in the background, see `Engine.close`, and release files.

        Whatever is asked of it later raises `ClosedError`.
        """
        self._folder.close()

    def __enter__(self) -> CachedRAG:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Documents -------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Mapping[str, str],
        *,
        metadata: Mapping[str, str | int | float | bool] | None = None,
        progress: Shown = True,
    ) -> IngestSummary:
        """Bring texts into the index that are in no file, and prefill their chunks.

        Args:
            texts: each under the name of its document ("faq/12"); a document of that name is
                replaced, and `delete` takes it.
            metadata: what is known of all of them, to filter by.
            progress: see `ingest`.

        Raises:
            DocumentError: a text is empty, or its name cannot be one; then none is added.
            ConfigError: metadata that is no string or number.
            IndexMismatchError, StoreFullError: see `ingest`.
        """
        return Ingestion(self._folder, self._limits).add(texts, metadata or {}, progress)

    def ingest(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        delete_missing: bool = False,
        ray: str | IngestWorkers | None = None,
        progress: Shown = True,
    ) -> IngestSummary:
        """Bring a file, or all files below a folder, into the index, and prefill their chunks.

        Doing it again costs little: unchanged documents are kept, changed ones replace their old
        chunks and KV, and an interrupted run goes on where it stopped.

        A document is named after its place in the folder, with the folder's name before it
        ("docs/guide/a.md"), a single file after itself: however the path was spelled, and wherever
        the folder is moved. A path inside a folder that was ingested belongs to that folder.

        Args:
            name: what to call the folder or file, instead of its own name. A document that had
                the same source before (this name, and the same path below it) is replaced,
                wherever it came from; other documents of this name stay.
            delete_missing: delete documents that were ingested from below `path` and are gone.
            ray: have the work done on a Ray cluster (extra `ray`, docs/scale.md): its address,
                "local" for processes of this machine, or a `ray_cached_rag.RayConfig`.
            progress: show bars on the terminal; or a function that is called with what is done
                ("reading", "prefilling" or "preparing"), how much of it, and of how much: bytes
                of files, tokens of chunks, or documents that workers prepare.

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
        place = absolute(path)
        is_folder(place)  # before a cluster is asked
        ingestion = Ingestion(self._folder, self._limits)
        with helped(ray, self._folder, place, self._limits) as prepare:
            return ingestion.run(
                place,
                name=name,
                delete_missing=delete_missing,
                progress=progress,
                prepare=prepare,
            )

    async def aingest(self, path: str | Path, **options: Any) -> IngestSummary:
        """As `ingest`, in a thread of its own, so that the event loop goes on.

        A cancelled task does not stop it: what is begun is brought to its end.
        """
        return await asyncio.to_thread(self.ingest, path, **options)

    def watch(
        self, path: str | Path, *, progress: bool = False, stop: Event | None = None
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
        place = absolute(path)

        def ingest(part: Path, whole: bool) -> IngestSummary:
            return Ingestion(self._folder, self._limits).run(
                part, name=None, delete_missing=whole, progress=progress, inside=place
            )

        return watch(place, ingest, ignored=self.path, stop=stop)

    def documents(self) -> list[IndexedDocument]:
        """All documents of the index, by source."""
        return self.index.documents()

    def delete(self, source: str | Path) -> Deletion:
        """Delete a document, its chunks, and the KV that no other document needs. Loads no model.

        Args:
            source: its name, as `documents` has it, or its path on disk.

        Raises:
            DocumentError: there is no such document, or the path stands for several.
            StoreError: the document is deleted, and its KV could not be; the next `open` tries
                again.
        """
        found = self.index.roots.find(source)
        chunks = len(self.index.texts(found))
        texts = self.index.delete(found)
        try:
            return Deletion(found, chunks, self._folder.forget(texts))
        except StoreError as error:
            raise type(error)(
                f"{found} is deleted, but not its KV: {error}; the KV goes when the index is "
                "opened again and this is mended"
            ) from error

    def hold(
        self,
        source: str | Path,
        *,
        pinned: bool | None = None,
        ttl_seconds: float | None = None,
    ) -> int:
        """Say how long the KV of a document is kept that there is now. Loads no model.

        The document stays in the index, and its KV is computed anew where it is needed.

        Args:
            source: as in `delete`.
            pinned, ttl_seconds: see `Engine.hold`; as for other documents with the same chunks.

        Returns:
            How many KVs these are.

        Raises:
            DocumentError: there is no such document, or the path stands for several.
            ConfigError, StoreFullError, StoreError: as `Engine.hold`.
        """
        texts = self.index.texts(self.index.roots.find(source))
        return self._folder.hold(texts, pinned=pinned, ttl_seconds=ttl_seconds)

    # Questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from the chunks nearest to it.

        Args:
            history: what was said before, in order: answers of this index, or messages of the user
                and the assistant. The model reads all of it; chunks are searched for with the last
                two questions and this one.
            config: how to answer; None for the defaults.
            options: settings by name, of `Retrieval` (`k`, `min_score`, `where`, `answer_anyway`,
                `reorder`) and of `GenerationConfig`, in place of those in `config`.

        Raises:
            ConfigError: an empty index, an empty question, or a bad setting or history.
            ContextOverflowError: question and history alone do not fit the model's context.
        """
        return self.stream(question, history=history, config=config, **options).result()

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
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.stream.cancel()

    def stream(
        self,
        question: str,
        *,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece."""
        wanted, config = _asked(options, config)
        return self._asking().answer(question, conversation(history), wanted, config)

    def chat(
        self,
        *,
        condense: bool = True,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Chat:
        """Begin a conversation. Its turns answer faster than `ask` with a history does.

        Each question's chunks stay where they were found, and those the conversation has already
        are not given again: so each prompt begins with the whole one before it, whose KV is kept.

        Args:
            condense: let the model rewrite a follow-up question for the search; else it is searched
                with the last two questions before it.
            history: a conversation to go on with: its `Chat.messages` or `Chat.history`, or other
                questions and answers in turn.
            config, options: see `ask`. Chunks that the conversation has already are enough to
                answer from; they are not reordered.

        Raises:
            ConfigError: a bad setting or history.
        """
        wanted, config = _asked(options, config)
        if wanted.reorder:
            raise ConfigError("a conversation keeps the order of its chunks; leave reorder out")
        return Chat(self._asking, wanted, config, condense=condense, said=resumed(history))

    def _asking(self) -> Asking:
        return Asking(self._folder, self._reranking)

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
        self, question: str, k: int = 6, *, history: Sequence[Answer | Message] = (), **options: Any
    ) -> list[Hit]:
        """The k chunks nearest to a question, best first.

        Args:
            history: see `ask`.
            options: settings of `Retrieval` by name: `min_score`, `where`.

        Raises:
            ConfigError: an empty index or question, or a bad k, min_score, history or filter.
        """
        check_question(question)
        agree(self._folder)
        text = searched(question, conversation(history))
        wanted = Retrieval(k, **parted(options, Retrieval)[0])
        require(
            not (wanted.reorder or wanted.answer_anyway),
            "reorder and answer_anyway say how `ask` answers, and a search gives the nearest "
            "chunks; leave them out",
        )
        hits, _ = find(self._folder, text, wanted, self._reranking)
        return hits


def _asked(
    options: dict[str, Any], config: GenerationConfig | None
) -> tuple[Retrieval, GenerationConfig]:
    """What is asked for by name: which chunks, and how to answer."""
    chunks, answer = parted(options, Retrieval, GenerationConfig)
    return Retrieval(**chunks), (config or GenerationConfig()).replace(**answer)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options less those that are None, for which an index has what it has."""
    return {name: value for name, value in options.items() if value is not None}


def _folder(path: str | Path) -> Path:
    root = absolute(path)  # the process may change its folder, and the index stays
    if not is_path(root):
        raise ConfigError(f"{str(path)!r} cannot be the name of an index; give another one")
    if os.path.isfile(root):  # unlike `is_file`, also of a name that is too long
        raise ConfigError(f"{root} is a file, and an index is a folder; give another path")
    return root


def _check_that_apply(
    model: str | None, engine: Engine | None, loading: Sequence[str], store: Mapping[str, Any]
) -> None:
    """Refuse settings that would mean nothing.

    Args:
        loading: names of those that an engine is loaded with.
    """
    if own := [name for name in _NOT_OF_AN_INDEX if name in store]:
        raise ConfigError(
            f"{', '.join(own)}: an index keeps its KV in its own folder, for itself; leave it out"
        )
    if engine is None:
        return
    other = ["model"] if model not in (None, engine.model.name) else []
    if given := [*other, *loading]:
        raise ConfigError(
            f"{', '.join(given)}: the engine that was given is loaded, and has a store of its own; "
            "give these to Engine.load, or leave engine= out"
        )
