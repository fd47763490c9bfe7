"""An index's folder: documents go in, and are deleted. Imports no framework.

Says what happens in which order; each step is somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.config import StoreConfig
from cached_rag.errors import ConfigError, DocumentError, IndexMismatchError, StoreError
from cached_rag.kv.store.holdings import forget, held_bytes
from cached_rag.library.context import Context
from cached_rag.rag.document import assembled
from cached_rag.rag.embedding import Embedder, Embeddings
from cached_rag.rag.filters import described
from cached_rag.rag.finding import is_folder
from cached_rag.rag.index import DocumentIndex, IndexedDocument
from cached_rag.rag.ingest import Ingestion, IngestSummary
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.preparing import Preparation
from cached_rag.rag.progress import Shown
from cached_rag.rag.roots import absolute
from cached_rag.rag.same_vectors import see_same_vectors
from cached_rag.rag.settings import DEFAULTS, RECALLED, contexts, encodings
from cached_rag.rag.watch import watch
from cached_rag.rag.workers import IngestWorkers, Prepare, helped

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from cached_rag.kv.store.remote.tier import RemoteTier

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deletion:
    """A deleted document: its source, and how many chunks and chunks' KVs went with it."""

    source: str
    chunks: int
    kvs: int


class IndexFolder:
    """The documents of an index, and what reads them. Models load when first needed."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, str],
        store: StoreConfig,
        engine_options: dict[str, Any],
        embedder: Embeddings | None,
        engine: Engine | None,
        limits: DocumentLimits,
    ) -> None:
        """See `open`.

        Args:
            settings: those that were asked for; the index's, or the defaults, are the others.
            engine_options: of `Engine.load`, besides those that an index remembers.
        """
        self.path = path
        self.index = DocumentIndex(path / "documents.sqlite")
        self._asked, self._store, self._engine_options = settings, store, engine_options
        self._engine, self._embedder = engine, embedder
        self._has_same_vectors = False
        self._limits = limits
        self._remote = _remote(store)
        self._is_loading = threading.Lock()  # several threads may be the first to ask
        try:
            self._agree()
        except IndexMismatchError:
            self.index.close()
            raise
        unneeded = self.index.unneeded()  # by deletions that nobody finished
        try:
            self._forget(unneeded)
        except StoreError as error:  # without `kv/`, too, questions are answered
            _log.warning("KV of deleted documents stays for now: %s", error)

    def _agree(self) -> None:
        """Take over the settings of the index, to which another process may have given some."""
        self.settings = DEFAULTS | self.index.agree(self._asked) | self._asked

    def _load_options(self) -> dict[str, Any]:
        """How the model is loaded; says where its KV will not be the index's."""
        for name, before in self._replaced().items():
            _log.warning(
                "the index was made with %s %r; with %r its chunks are encoded anew",
                *(name, before, self.settings[name]),
            )
        return self._engine_options | {name: self.settings[name] or None for name in RECALLED}

    def _replaced(self) -> dict[str, str]:
        """What the index has of those settings of its model that are others now."""
        kept = self.index.settings()
        return {n: kept[n] for n in RECALLED if n in kept and kept[n] != self.settings[n]}

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        from cached_rag.engine.engine import Engine  # with all that runs models

        with self._is_loading:
            if self._engine is None:
                self._agree()
                store = replace(self._store, codec=self.settings["codec"])
                model = self.settings["model"]
                self._engine = Engine.load(model, store=store, **self._load_options())
                self._asked = self.settings  # from now on no others will do
            return self._engine

    @property
    def embedder(self) -> Embeddings:
        """The embedding model, loaded on first use; the index has its vectors from then on."""
        with self._is_loading:
            if self._embedder is None:
                self._agree()
                embedder = Embedder(self.settings["embedding"])
                embedder.load()
                self._embedder = embedder
                self._asked = self.settings
            if not self._has_same_vectors:
                see_same_vectors(self.index, self._embedder)
                self._has_same_vectors = True
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
        if not isinstance(texts, Mapping):
            raise ConfigError('texts are given by name: {"faq/12": "How is ..."}')
        known = described(metadata or {})
        documents = [assembled(name, [(text, known)]) for name, text in texts.items()]
        for one in documents:
            self.index.roots.check_free(one.source)
            if not one.text:
                raise DocumentError(f"the text {one.source!r} is empty; leave it out")
        ingestion = self._ingestion()
        self.index.roots.forget(one.source for one in documents)
        return ingestion.add(documents, progress=progress)

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
        ingestion = self._ingestion()
        hired: AbstractContextManager[Prepare | None] = nullcontext()
        if ray is not None:
            own = (ingestion.preparation, self.settings, self._load_options())
            hired = helped(ray, *own, folder=self.path, documents=place, limits=self._limits)
        with hired as prepare:
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
        place = absolute(path)

        def ingest(part: Path, whole: bool) -> IngestSummary:
            return self._ingestion().run(
                part, name=None, delete_missing=whole, progress=progress, inside=place
            )

        return watch(place, ingest, ignored=self.path, stop=stop)

    def _ingestion(self) -> Ingestion:
        self._agree()
        ways = (self._prepared, self._held_bytes)
        return Ingestion(self.index, *ways, self.settings, self._forget_later, self._limits)

    def _prepared(self) -> Preparation:
        return Preparation.of(self.engine, self.embedder, self.settings, self._contexts())

    def _held_bytes(self, texts: Collection[str]) -> int | None:
        """See `Ingestion`. A remote store, and an engine of somebody's own, are asked instead."""
        if self._engine is not None or self._remote is not None or self._replaced():
            return None
        count = encodings(self.settings["context"])
        return held_bytes(self.path / "kv", texts, count)

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
            return Deletion(found, chunks, self._forget(texts))
        except StoreError as error:
            raise type(error)(
                f"{found} is deleted, but not its KV: {error}; the KV goes when the index is "
                "opened again and this is mended"
            ) from error

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
        gone += forget(self.path / "kv", texts, self._remote)
        self.index.forgotten(texts)
        return gone

    def _contexts(self) -> tuple[Context | None, ...]:
        return contexts(self.settings["context"])


def _remote(store: StoreConfig) -> RemoteTier | None:
    if store.remote is None:
        return None
    from cached_rag.kv.store.remote.tier import open_remote

    return open_remote(store)
