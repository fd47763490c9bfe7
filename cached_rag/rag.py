"""Documents in, answers out: the index of a folder joined with the engine.

Knows the order of things; every step is somebody else's. No framework is imported here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cached_rag.answer import Answer, AnswerStream, conversation, remarks
from cached_rag.answering import Clock
from cached_rag.config import BatchConfig, GenerationConfig, StoreConfig
from cached_rag.context import PRIMER, Context
from cached_rag.documents import (
    DEFAULT_EMBEDDING,
    DocumentIndex,
    Embedder,
    Embeddings,
    Hit,
    Splitter,
)
from cached_rag.engine import Engine
from cached_rag.errors import ConfigError, IndexMismatchError
from cached_rag.fingerprint import digest
from cached_rag.ingest import Ingestion, IngestSummary
from cached_rag.prompt import Message
from cached_rag.prompts import Prompts, Turn, searched

SYSTEM = "Answer the question with the help of the documents. Be brief and exact."
_DEFAULTS = {
    "model": "smollm2-135m",
    "embedding": DEFAULT_EMBEDDING,
    "chunk_tokens": "256",
    "codec": "raw",
    "context": "primer",
    "system": SYSTEM,
}


class CachedRAG:
    """A folder of documents that can be asked. Models load when first needed."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, str],
        store: StoreConfig,
        engine_options: dict[str, Any],
        embedder: Embeddings | None,
    ) -> None:
        self.path = path
        self.settings = settings
        self.index = DocumentIndex(path / "documents.sqlite")
        self._agree(settings)
        self._store = store
        self._engine_options = engine_options
        self._engine: Engine | None = None
        self._embedder = embedder
        self._loading = threading.Lock()  # several may be the first to ask

    @classmethod
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
        sequence_bytes: int = 0,
        finish_seconds: float = 30.0,
        engine: Engine | None = None,
        batch: BatchConfig | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> CachedRAG:
        """Open an index folder, or make one.

        Args:
            model: alias, hub id, folder or GGUF file; with the next four, kept in the index. None
                takes what the index was made with, or the default.
            embedding: a sentence-transformers name, or an object that embeds.
            chunk_tokens: most tokens of a chunk, counted by the model's tokenizer.
            codec: how KV is kept on disk, "raw" or "int8".
            context: what chunks are encoded behind, besides the prompt's head: "primer" (some
                neutral text), "none", "both" (the first chunk of a prompt is exact then), or
                "neighbours:n" (the n nearest chunks). The last two take two passes and twice the
                disk; see docs/quality.md.
            system: the system prompt that questions are asked under.
            memory_bytes, disk_bytes: bounds on the KV kept in memory and on disk.
            sequence_bytes: keep KV of whole runs of chunks as prompts left them, see `StoreConfig`.
            finish_seconds: how long `close` may go on encoding what waits, see `StoreConfig`.
            engine: one that exists already, instead of loading `model`; it keeps its own store.
            batch: bounds on answers made at the same time.
            dtype, device: see `load_model`.

        Raises:
            IndexMismatchError: the index was made with other settings.
            ConfigError: a bad setting.
        """
        named = embedding if isinstance(embedding, str) or embedding is None else embedding.name
        asked = {
            "model": engine.model.name if engine else model,
            "embedding": named,
            "chunk_tokens": None if chunk_tokens is None else str(chunk_tokens),
            "codec": codec,
            "context": context,
            "system": system,
        }
        if context is not None:
            _context_kind(context)
        root = Path(path).expanduser()
        settings = {name: value for name, value in asked.items() if value is not None}
        store = StoreConfig(
            str(root / "kv"),
            codec or "raw",
            memory_bytes,
            disk_bytes,
            sequence_bytes=sequence_bytes,
            finish_seconds=finish_seconds,
        )
        embedder = None if isinstance(embedding, str) else embedding
        rag = cls(
            root, settings, store, {"dtype": dtype, "device": device, "batch": batch}, embedder
        )
        rag._engine = engine
        return rag

    def _agree(self, asked: dict[str, str]) -> None:
        """Take over the index's settings; refuse others; write them into a new index."""
        for name, default in _DEFAULTS.items():
            kept = self.index.setting(name)
            if kept is None:
                kept = asked.get(name, default)
                self.index.set_setting(name, kept)
            elif name in asked and asked[name] != kept:
                self.index.close()
                raise IndexMismatchError(
                    f"the index at {self.path} was made with {name} {kept!r}, not {asked[name]!r}; "
                    "open it without that setting, or ingest into another folder"
                )
            self.settings[name] = kept

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        with self._loading:
            if self._engine is None:
                store = replace(self._store, codec=self.settings["codec"])
                model = self.settings["model"]
                self._engine = Engine.load(model, store=store, **self._engine_options)
            return self._engine

    @property
    def _prompts(self) -> Prompts:
        return Prompts(self.engine, self.settings["system"])

    @property
    def embedder(self) -> Embeddings:
        """The embedding model, loaded on first use."""
        with self._loading:
            if self._embedder is None:
                embedder = Embedder(self.settings["embedding"])
                embedder.load()
                self._embedder = embedder
            return self._embedder

    def close(self) -> None:
        """Finish what waits in the background, see `Engine.close`, and release files."""
        self.index.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> CachedRAG:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Ingestion -------------------------------------------------------------------------------

    def ingest(
        self, path: str | Path, *, delete_missing: bool = False, progress: bool = True
    ) -> IngestSummary:
        """Bring a file, or all files below a folder, into the index, and prefill their chunks.

        Doing it again costs little: what is unchanged is kept, what changed replaces its chunks
        and their KV, and an interrupted run goes on where it stopped.

        Args:
            delete_missing: drop documents that were ingested from below `path` and are gone.
            progress: show bars on the terminal.

        Raises:
            DocumentError: nothing is at `path`. Unreadable files are skipped and reported.
            StoreFullError: the disk is full; what was ingested before is kept.
        """
        ingestion = Ingestion(
            self.index,
            self.engine,
            self.embedder,
            Splitter(self._count_tokens, int(self.settings["chunk_tokens"])),
            self._prompts.head(),
            self._contexts(),
        )
        return ingestion.run(Path(path), delete_missing=delete_missing, progress=progress)

    def delete(self, source: str | Path) -> None:
        """Drop a document, its chunks, and KV that no other document needs."""
        self.engine.forget(self.index.delete(str(source)))

    def _count_tokens(self, text: str) -> int:
        return len(self.engine.tokenization.literal(text))

    # Questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        k: int = 6,
        history: Sequence[Answer | Message] = (),
        min_score: float | None = None,
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> Answer:
        """Answer a question from the k nearest chunks; options are `GenerationConfig`'s.

        Args:
            history: what was said before, in order: answers of this index, or messages of the user
                and the assistant. The model reads all of it; chunks are searched for with the last
                two questions and this one.
            min_score: leave out chunks whose cosine similarity is less; None uses all k. Where none
                is left, the model answers without, and `report.notes` says so. They also say where
                the nearest chunk has less than 0.25.
            reorder: let chunks begin in an order that an earlier prompt had, so that its KV serves
                again (needs `sequence_bytes`); changes the prompt, and with it maybe the answer.

        Raises:
            ConfigError: an empty index, an empty question, or a bad setting or history.
            ContextOverflowError: question and history alone do not fit the model's context.
        """
        stream = self.stream(
            question,
            k=k,
            history=history,
            min_score=min_score,
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
        config: GenerationConfig | None = None,
        reorder: bool = False,
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece."""
        config = (config or GenerationConfig()).replace(**options)
        engine, _ = self.engine, self.embedder  # loading them is no part of a question's time
        clock = Clock()
        said = conversation(history)
        found = self._nearest(question, k, said)
        hits = _reaching(min_score, found)
        search_ms = clock.total()
        engine.prefetch([hit.text for hit in hits])
        if reorder:
            names = [digest(hit.text.strip()) for hit in hits]
            hits = [hits[index] for index in engine.sequences.order(names)]
        hits, rendered = self._prompts.fitting(question, hits, config.max_tokens, said)
        stream = engine.stream(rendered, config, clock=clock)
        return AnswerStream(
            stream,
            tuple(hits),
            question=question,
            search_ms=search_ms,
            notes=remarks(found, min_score),
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
    ) -> list[Hit]:
        """The k chunks nearest to a question, best first.

        Args:
            history, min_score: see `ask`.

        Raises:
            ConfigError: an empty index or question, k < 1, or a bad history.
        """
        return _reaching(min_score, self._nearest(question, k, conversation(history)))

    def _nearest(self, question: str, k: int, said: Sequence[Turn]) -> list[Hit]:
        if not question.strip() or k < 1:
            raise ConfigError("a question needs some text, and k must be at least 1")
        hits = self.index.search(self.embedder.embed([searched(question, said)])[0], k)
        if not hits:
            raise ConfigError(f"the index at {self.path} is empty; ingest documents first")
        return hits

    def _contexts(self) -> tuple[Context | None, ...]:
        """What chunks are encoded behind, besides the head, in this order."""
        kind, count = _context_kind(self.settings["context"])
        if kind != "neighbours":
            return {"none": (None,), "primer": (PRIMER,), "both": (None, PRIMER)}[kind]

        def nearest(text: str) -> list[str]:
            hits = self.index.search(self.embedder.embed([text])[0], count + 1)
            return [hit.text for hit in reversed(hits) if hit.text != text][-count:]

        return None, Context(f"neighbours:{count}", nearest)


def _reaching(min_score: float | None, hits: list[Hit]) -> list[Hit]:
    return hits if min_score is None else [hit for hit in hits if hit.score >= min_score]


def _context_kind(text: str) -> tuple[str, int]:
    """("none" | "primer" | "both" | "neighbours", how many)."""
    kind, _, count = text.partition(":")
    is_counted = kind == "neighbours" and count.isdigit() and int(count) > 0
    if not is_counted and text not in ("none", "primer", "both"):
        raise ConfigError(f"context {text!r} is not one of none, primer, both, neighbours:n")
    return kind, int(count or 0)
