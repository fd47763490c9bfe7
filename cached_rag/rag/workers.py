"""Gets documents ready for an index, in this process or in others, which may be on other machines.

That is to split them, embed their chunks, and have these encoded. A worker reads, too, and puts KV
into the store itself; the index is written by who asked. Knows no cluster:
`integrations/ray_cached_rag` is one.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Protocol

from cached_rag.config import StoreConfig
from cached_rag.errors import ClusterError, ConfigError, DocumentError, StoreError, needs_extra
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import EncodeSummary
from cached_rag.options import require
from cached_rag.rag.answer import Prompts
from cached_rag.rag.chunks import TITLE_TOKENS, Chunk, Embedder, Embeddings, Splitter, embedded
from cached_rag.rag.document import Document, DocumentLimits
from cached_rag.rag.folder import IndexFolder, contexts
from cached_rag.rag.reading_process import ConfinedReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cached_rag.engine.engine import Engine

# Documents are encoded together until their chunks fill a few batches.
_GROUP_CHUNKS = 32
# Most bytes of KV that a worker keeps in memory: what it has encoded it does not need again.
_WORKER_BYTES = 64 << 20


class Preparation:
    """What documents are prepared with, by the settings of an index."""

    def __init__(self, engine: Engine, embedder: Embeddings, settings: Mapping[str, str]) -> None:
        """See that chunks fit.

        Raises:
            ConfigError: chunks as long as these settings have them exceed the model's context.
        """
        chunk_tokens = int(settings["chunk_tokens"])
        self.engine, self.embedder = engine, embedder
        self.splitter = Splitter(lambda text: len(engine.tokenization.literal(text)), chunk_tokens)
        self.contexts = contexts(settings)
        self._head = Prompts(engine, settings["system"]).head()
        room, before = engine.model.context_length, engine.count_tokens(self._head)
        require(
            before + TITLE_TOKENS + chunk_tokens <= room,
            f"chunks of {chunk_tokens} tokens, a title ({TITLE_TOKENS}) and the prompt's head "
            f"({before}) exceed the model's context of {room}; choose smaller chunk_tokens in a "
            "new index, or a shorter system prompt",
        )

    def encode(
        self,
        documents: Sequence[Sequence[str]],
        tokens_done: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """See that chunks have KV behind each of the contexts.

        Args:
            documents: the chunks of each, in their order.
            tokens_done: called after each batch with the number of tokens in it.
        """
        return self.engine.encode(
            documents, self._head, context=self.contexts, token_progress=tokens_done
        )


def content(document: Document) -> str:
    """Digest of all of a document that an index keeps."""
    known = [json.dumps(document.parts)] if document.parts else []
    return digest(document.title, document.text, *known)


def groups(texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Sequence[str]]]:
    """Documents in groups, each with chunks enough for a few batches."""
    group: dict[str, Sequence[str]] = {}
    for source, chunks in texts.items():
        group[source] = chunks
        if sum(map(len, group.values())) >= _GROUP_CHUNKS:
            yield group
            group = {}
    if group:
        yield group


@dataclass(frozen=True)
class IngestTask:
    """A document that a worker is to prepare.

    Attributes:
        source: its name in the index.
        path: the file, absolute.
        known: digest of what the index has under that name; "" for nothing.
    """

    source: str
    path: str
    known: str = ""


@dataclass(frozen=True)
class PreparedDocument:
    """What a worker made of a document.

    Attributes:
        digest: of its content.
        chunks, vectors: its chunks in order, and (len(chunks), dim) float32, each row of unit
            length; None if the index has this content already.
        skipped: why the file could not be read; else "".
    """

    source: str
    digest: str = ""
    chunks: tuple[Chunk, ...] = ()
    vectors: NDArray[np.float32] | None = None
    skipped: str = ""


@dataclass(frozen=True)
class PreparedBatch:
    """What a worker made of some tasks, in their order. The chunks' KV is in the store by then.

    Attributes:
        encoded, tokens: how many chunks were prefilled for it, and how many tokens that were.
    """

    documents: tuple[PreparedDocument, ...]
    encoded: int = 0
    tokens: int = 0


# Has tasks done by workers; their batches come in the order of the tasks.
Prepare = Callable[[Sequence[IngestTask]], Iterator[PreparedBatch]]


class IngestWorkers(Protocol):
    """Processes, on this machine or others, that prepare documents."""

    def prepare(self, recipe: IngestRecipe, tasks: Sequence[IngestTask]) -> Iterator[PreparedBatch]:
        """Have tasks done by the recipe; their batches come in the order of the tasks.

        Raises:
            ClusterError: the processes cannot be reached, or failed.
            CachedRAGError: what a worker raised.
        """
        ...


@dataclass(frozen=True)
class IngestRecipe:
    """What a worker is told, so that it prepares documents as the process that asks would.

    Attributes:
        settings: the index's.
        options: for `Engine.load`.
        store: where the worker puts KV.
        embedding: what embeds; None for the model that the settings name.
        fingerprint: of the model that the worker has to have.
        documents: the file or folder that is ingested.
        sees: paths that have to be there for the worker.
        limits: on reading a document.
    """

    settings: Mapping[str, str]
    options: Mapping[str, Any]
    store: StoreConfig
    embedding: Embeddings | None
    fingerprint: str
    documents: str
    sees: tuple[str, ...]
    limits: DocumentLimits = field(default_factory=DocumentLimits)

    def open(self) -> IngestWorker:
        """Load the models, in the worker's process.

        Raises:
            ClusterError: the machine lacks a path, or has another model under the model's name.
            ModelError, StoreError: see `Engine.load`.
        """
        from cached_rag.engine.engine import Engine  # with all that runs models

        host = socket.gethostname()
        for path in self.sees:
            if not Path(path).exists():
                raise ClusterError(
                    f"a worker on {host} does not see {path}; put the documents, and the index if "
                    "it has no remote store, into a folder that all machines have at that place"
                )
        name = self.settings["model"]
        engine = Engine.load(name, store=self.store, **self.options)
        if engine.model.fingerprint != self.fingerprint:
            engine.close()
            raise ClusterError(
                f"a worker on {host} has other weights or settings as {name}, whose KV would never "
                "be found; give all machines the same, and open the index with model=, dtype= and "
                "so on instead of engine="
            )
        embedder = self.embedding or Embedder(self.settings["embedding"])
        preparation = Preparation(engine, embedder, self.settings)
        return IngestWorker(preparation, self.limits, Path(self.documents))


@dataclass(frozen=True)
class IngestWorker:
    """The models of a worker's process."""

    preparation: Preparation
    limits: DocumentLimits
    documents: Path

    def prepare(self, tasks: Sequence[IngestTask]) -> PreparedBatch:
        """Read, split, embed and encode; files that cannot be read are skipped."""
        documents: list[PreparedDocument] = []
        texts: dict[str, list[str]] = {}
        with ConfinedReader(self.limits, self.documents) as reader:
            for task in tasks:
                try:
                    document = reader.load(task.path)
                except DocumentError as error:
                    documents.append(PreparedDocument(task.source, skipped=str(error)))
                    continue
                chunks = self.preparation.splitter.split(document)
                texts[task.source] = [chunk.text for chunk in chunks]
                made = PreparedDocument(task.source, content(document))
                if made.digest != task.known:
                    vectors = embedded(self.preparation.embedder, texts[task.source])
                    made = replace(made, chunks=tuple(chunks), vectors=vectors)
                documents.append(made)
        parts = ([*group.values()] for group in groups(texts))
        done = sum(map(self.preparation.encode, parts), EncodeSummary())
        if done.unsent:
            raise StoreError(
                f"{done.unsent} KVs could not be sent to the remote store, so what a worker "
                "computes is lost; see that it is there and has room, and ingest again"
            )
        return PreparedBatch(tuple(documents), done.encoded, done.tokens)


@contextmanager
def helped(
    ray: str | IngestWorkers | None,
    folder: IndexFolder,
    documents: Path,
    limits: DocumentLimits,
) -> Iterator[Prepare | None]:
    """Workers that prepare as this process would, for as long as the context lasts.

    Args:
        ray: the workers, or the address of a Ray cluster; None for no help.
        folder: the index's.
        documents: the file or folder that is ingested.
        limits: on reading a document.

    Raises:
        ConfigError: workers cannot do it by these settings.
        MissingPackageError: Ray is not installed.
    """
    if ray is None:
        yield None
        return
    engine, embedder, options = folder.engine, folder.embedder, folder.load_options()
    store = _for_workers(engine.settings)
    dtype = str(engine.model.shapes.dtype).removeprefix("torch.")
    # Where a CPU has no bf16, fp32 that nobody asked for has other weights than fp32 by name.
    if options["backend"] == "transformers" and not (folder.owns_engine and dtype == "float32"):
        options["dtype"] = dtype
    with NamedTemporaryFile(dir=folder.path, prefix=".seen-") as token:
        recipe = IngestRecipe(
            folder.settings,
            options,
            store,
            None if isinstance(embedder, Embedder) else embedder,
            engine.model.fingerprint,
            str(documents),
            (str(documents), *([token.name] if store.path else [])),
            limits,
        )
        hired = workers(ray) if isinstance(ray, str) else ray
        yield partial(hired.prepare, recipe)


def workers(address: str, **options: float) -> IngestWorkers:
    """The workers of a Ray cluster.

    They come as an entry point of the group `cached_rag.workers`, so the core knows no framework.

    Args:
        options: of `ray_cached_rag.RayConfig`.

    Raises:
        MissingPackageError: Ray is not installed, or this package is only on the path.
        ConfigError: an option is refused.
    """
    found = tuple(entry_points(group="cached_rag.workers", name="ray"))
    with needs_extra("ray", "ingestion by workers"):
        if not found:
            raise ModuleNotFoundError("its entry point is not there, as without an installation")
    made: IngestWorkers = found[0].load()(address=address, **options)
    return made


def _for_workers(store: StoreConfig) -> StoreConfig:
    """The store as workers open it: one with a remote tier without a folder.

    Raises:
        ConfigError: it is in this process's memory, where no worker can put anything.
    """
    if not (store.remote or store.path):
        raise ConfigError(
            "the engine keeps KV in memory only, where workers cannot put theirs; give its "
            "StoreConfig a path, or open the index with model= instead of engine="
        )
    return replace(
        store,
        path=None if store.remote else str(Path(str(store.path)).expanduser().absolute()),
        memory_bytes=_WORKER_BYTES,
        device_bytes=0,
        sequence_bytes=0,
        sequence_disk_bytes=None,
        harvest=None,
        write_back=False,
        learn="off",
    )
