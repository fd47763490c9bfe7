"""Brings documents into an index, and sees that all their chunks have KV.

Each step keeps what is there already, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cached_rag.backends.tokenizer import Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import DocumentError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import Context
from cached_rag.rag.document import Document
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.progress import Say, prefilling, reading
from cached_rag.rag.readers import load_document, look_at
from cached_rag.rag.roots import absolute, is_below, join
from cached_rag.rag.splitting import Splitter

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Documents are encoded together until their chunks fill a few batches.
_GROUP_CHUNKS = 32
# Chunks embedded at a time; the bar moves after each batch.
EMBED_CHUNKS = 128


@dataclass(frozen=True)
class IngestSummary:
    """What an ingestion did.

    Attributes:
        added: number of documents that were new or had changed.
        unchanged: number of documents that were in the index already.
        chunks: number of chunks in the index now.
        encoded: number of chunks that were prefilled.
        tokens, seconds: how many tokens that were, and how long it took.
        deleted: number of documents that were deleted.
        skipped: (path, reason) of each file that could not be read.
        passed_over: (suffix, count) of files without a reader, most frequent first.
    """

    added: int
    unchanged: int
    chunks: int
    encoded: int
    tokens: int
    seconds: float
    deleted: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ingestion:
    """What an ingestion works with.

    Attributes:
        settings: the index's, if it has none yet.
        head, contexts: chunks are encoded behind the head and, in turn, each of the contexts.
        forget: given texts that no document has any more, deletes their KV.
    """

    index: DocumentIndex
    engine: Engine
    embedder: Embeddings
    splitter: Splitter
    settings: Mapping[str, str]
    head: Rendered
    contexts: tuple[Context | None, ...]
    forget: Callable[[Sequence[str]], object]

    def run(
        self, path: Path, *, name: str | None, delete_missing: bool, progress: bool
    ) -> IngestSummary:
        """Read, index, delete, encode; see `CachedRAG.ingest`."""
        path = absolute(path)
        found = look_at(path)
        base = self._called(path, found.files, name)
        files = {join(base, file.relative_to(path)): file for file in found.files}
        added, skipped, texts = self._read(files, progress)
        deleted = self._delete_missing(base, files) if delete_missing else 0
        summary = self._encode(added, texts, progress)
        return replace(
            summary, deleted=deleted, skipped=tuple(skipped), passed_over=found.passed_over
        )

    def add(self, documents: Sequence[Document], *, progress: bool) -> IngestSummary:
        """Index and encode documents that are in memory."""
        added = sum(self._update(one.source, one, lambda *_: None) for one in documents)
        texts = {one.source: self.index.texts(one.source) for one in documents}
        return self._encode(added, texts, progress)

    def _read(
        self, files: Mapping[str, Path], progress: bool
    ) -> tuple[int, list[tuple[str, str]], dict[str, list[str]]]:
        """Index files that changed: their number, files skipped and why, all chunks by source."""
        added, skipped, texts = 0, [], {}
        with reading(files.values(), is_shown=progress) as begun:
            for source, (file, say) in zip(files, begun, strict=True):
                try:
                    say("reading", 0.0)
                    added += self._update(source, load_document(file), say)
                except DocumentError as error:
                    skipped.append((str(file), str(error)))
                    continue
                say("counting tokens", 1.0)
                texts[source] = self.index.texts(source)
                self.engine.register(texts[source])  # counts their tokens
        return added, skipped, texts

    def _called(self, path: Path, files: Sequence[Path], name: str | None) -> str:
        """The source of an absolute path in the index."""
        roots = self.index.roots
        root = roots.choose(path, files, name, self._is_unchanged)
        for source in roots.absorb(root):
            self.forget(self.index.delete(source))
        roots.keep(root)
        return root.source(path) or root.name

    def _is_unchanged(self, source: str, file: Path) -> bool:
        try:
            return self.index.holds(source, _content(load_document(file)))
        except DocumentError:
            return False

    def _update(self, source: str, document: Document, say: Say) -> bool:
        """Index a document, unless it is indexed as it is; says whether it had to."""
        content = _content(document)
        if self.index.holds(source, content):
            return False
        say("splitting", 0.0)
        chunks = self.splitter.split(document)
        vectors = self._embedded([chunk.text for chunk in chunks], say)
        self.forget(self.index.replace(source, content, chunks, vectors, self.settings))
        return True

    def _embedded(self, texts: Sequence[str], say: Say) -> NDArray[np.float32]:
        """(len(texts), dim) float32; part by part, so that the bar moves in long documents."""
        parts = []
        for begin in range(0, max(1, len(texts)), EMBED_CHUNKS):
            say(f"embedding {len(texts)} chunks", begin / max(1, len(texts)))
            parts.append(self.embedder.embed(texts[begin : begin + EMBED_CHUNKS]))
        return np.concatenate(parts)

    def _delete_missing(self, base: str, present: Iterable[str]) -> int:
        gone = {source for source in self.index.sources() if is_below(source, base)}
        gone -= set(present)
        for source in gone:
            self.forget(self.index.delete(source))
        return len(gone)

    def _encode(self, added: int, texts: dict[str, list[str]], progress: bool) -> IngestSummary:
        """Encode chunks that have no KV, and mark documents that are done.

        Args:
            added: how many of the documents were new or had changed.
            texts: all chunks of each document, by its source.
        """
        groups = [
            (group, [t for source in group for t in texts[source]]) for group in _groups(texts)
        ]
        sizes = [self.engine.register(chunks) for _, chunks in groups]
        encoded, tokens, seconds, done = 0, 0, 0.0, 0
        with prefilling(sum(sizes) * len(self.contexts), is_shown=progress) as bar:
            for (group, chunks), size in zip(groups, sizes, strict=True):
                for context in self.contexts:
                    summary = self.engine.encode(
                        chunks, self.head, context=context, token_progress=bar.update
                    )
                    tokens += summary.tokens
                    seconds += summary.seconds if summary.encoded else 0.0
                    done += size
                    bar.update(done - bar.n)  # chunks that had KV already
                self.forget(self.index.orphans(chunks))  # chunks that others deleted meanwhile
                for source in group:
                    self.index.mark_encoded(source)
                encoded += summary.encoded
        return IngestSummary(
            added=added,
            unchanged=len(texts) - added,
            chunks=self.index.count()[1],
            encoded=encoded,
            tokens=tokens,
            seconds=seconds,
        )


def _content(document: Document) -> str:
    known = [json.dumps(document.parts)] if document.parts else []
    return digest(document.title, document.text, *known)


def _groups(texts: dict[str, list[str]]) -> Iterator[list[str]]:
    """Sources in groups, each with chunks enough for a few batches."""
    group: list[str] = []
    size = 0
    for source, chunks in texts.items():
        group.append(source)
        size += len(chunks)
        if size >= _GROUP_CHUNKS:
            yield group
            group, size = [], 0
    if group:
        yield group
