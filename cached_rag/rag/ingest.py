"""Brings documents into an index and sees that all their chunks have KV.

Every step is repeatable: what is there is kept, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cached_rag.backends.tokenizer import Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import DocumentError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import Context
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.progress import Say, prefilling, reading
from cached_rag.rag.readers import Document, load_document, look_at
from cached_rag.rag.roots import absolute, is_below, join
from cached_rag.rag.splitting import Splitter

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Documents are encoded together until their chunks fill a few batches.
_GROUP_CHUNKS = 32
_EMBED_CHUNKS = 128


@dataclass(frozen=True)
class IngestSummary:
    """What an ingestion did.

    Attributes:
        added: documents that are new or had changed.
        unchanged: documents that were there already.
        deleted: documents that are gone.
        skipped: (path, reason) of files that could not be read.
        chunks: in the index now.
        encoded: chunks prefilled now.
        tokens, seconds: of that prefill.
        passed_over: (suffix, count) of files of kinds without a reader, most frequent first.
    """

    added: int
    unchanged: int
    deleted: int
    skipped: tuple[tuple[str, str], ...]
    chunks: int
    encoded: int
    tokens: int
    seconds: float
    passed_over: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ingestion:
    """What an ingestion works with.

    Attributes:
        settings: what the index is made with, if this is its first document.
        head, contexts: what chunks are encoded behind: the head, and then each of the contexts.
        forget: drops texts that no document has any more, and their KV.
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
        encoded, tokens, seconds = self._encode(texts, progress)
        return IngestSummary(
            added=added,
            unchanged=len(texts) - added,
            deleted=deleted,
            skipped=tuple(skipped),
            chunks=self.index.count()[1],
            encoded=encoded,
            tokens=tokens,
            seconds=seconds,
            passed_over=found.passed_over,
        )

    def _read(
        self, files: Mapping[str, Path], progress: bool
    ) -> tuple[int, list[tuple[str, str]], dict[str, list[str]]]:
        """Index what changed: how many that were, what was skipped and why, chunks by source."""
        added, skipped, texts = 0, [], {}
        with reading(files.values(), is_shown=progress) as begun:
            for source, (file, say) in zip(files, begun, strict=True):
                try:
                    added += self._update(source, file, say)
                except DocumentError as error:
                    skipped.append((str(file), str(error)))
                    continue
                say("counting tokens", 1.0)
                texts[source] = self.index.texts(source)
                self.engine.register(texts[source])
        return added, skipped, texts

    def _called(self, path: Path, files: Sequence[Path], name: str | None) -> str:
        """What an absolute path is called in the index."""
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

    def _update(self, source: str, file: Path, say: Say) -> bool:
        """Index a file unless just this content is; says whether it had to."""
        say("reading", 0.0)
        document = load_document(file)
        content = _content(document)
        if self.index.holds(source, content):
            return False
        say("splitting", 0.0)
        chunks = self.splitter.split(document)
        vectors = self._embedded([chunk.text for chunk in chunks], say)
        self.forget(self.index.replace(source, content, chunks, vectors, self.settings))
        return True

    def _embedded(self, texts: Sequence[str], say: Say) -> NDArray[np.float32]:
        """(len(texts), dim), a part at a time, so that a long document is seen to move."""
        parts = []
        for begin in range(0, max(1, len(texts)), _EMBED_CHUNKS):
            say(f"embedding {len(texts)} chunks", begin / max(1, len(texts)))
            parts.append(self.embedder.embed(texts[begin : begin + _EMBED_CHUNKS]))
        return np.concatenate(parts)

    def _delete_missing(self, base: str, present: Iterable[str]) -> int:
        gone = {source for source in self.index.sources() if is_below(source, base)}
        gone -= set(present)
        for source in gone:
            self.forget(self.index.delete(source))
        return len(gone)

    def _encode(self, texts: dict[str, list[str]], progress: bool) -> tuple[int, int, float]:
        """Encode what has no KV; documents are marked as they are done."""
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
                    bar.update(done - bar.n)  # by what was there already
                self.forget(self.index.orphans(chunks))  # which others deleted meanwhile
                for source in group:
                    self.index.mark_encoded(source)
                encoded += summary.encoded
        return encoded, tokens, seconds


def _content(document: Document) -> str:
    return digest(document.title, document.text)


def _groups(texts: dict[str, list[str]]) -> Iterator[list[str]]:
    """Documents together until they have enough chunks for a few batches."""
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
