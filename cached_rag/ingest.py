"""Brings documents into an index and sees that all their chunks have KV.

Every step is repeatable: what is there is kept, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cached_rag.context import Context
from cached_rag.documents import DocumentIndex, Embeddings, Splitter, find_documents, load_document
from cached_rag.engine import Engine
from cached_rag.errors import DocumentError
from cached_rag.fingerprint import digest
from cached_rag.prompt import Rendered

# Documents are encoded together until their chunks fill a few batches.
_GROUP_CHUNKS = 32


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
    """

    added: int
    unchanged: int
    deleted: int
    skipped: tuple[tuple[str, str], ...]
    chunks: int
    encoded: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Ingestion:
    """What an ingestion works with.

    Attributes:
        settings: what the index is made with, if this is its first document.
        head, contexts: what chunks are encoded behind: the head, and then each of the contexts.
    """

    index: DocumentIndex
    engine: Engine
    embedder: Embeddings
    splitter: Splitter
    settings: Mapping[str, str]
    head: Rendered
    contexts: tuple[Context | None, ...]

    def run(self, path: Path, *, delete_missing: bool, progress: bool) -> IngestSummary:
        """Read, index, delete, encode; see `CachedRAG.ingest`."""
        files = [file.resolve() for file in find_documents(path)]
        added, skipped = [], []
        for file in tqdm(files, "reading", unit="file", disable=not progress):
            try:
                if self._update(file):
                    added.append(str(file))
            except DocumentError as error:
                skipped.append((str(file), str(error)))
        deleted = self._delete_missing(path, files) if delete_missing else 0
        failed = {source for source, _ in skipped}
        sources = [str(file) for file in files if str(file) not in failed]
        encoded, tokens, seconds = self._encode(sources, progress)
        return IngestSummary(
            added=len(added),
            unchanged=len(sources) - len(added),
            deleted=deleted,
            skipped=tuple(skipped),
            chunks=self.index.count()[1],
            encoded=encoded,
            tokens=tokens,
            seconds=seconds,
        )

    def _update(self, file: Path) -> bool:
        """Index a file unless just this content is; says whether it had to."""
        document = load_document(file)
        content = digest(document.title, document.text)
        if self.index.holds(str(file), content):
            return False
        chunks = self.splitter.split(document)
        vectors = self.embedder.embed([chunk.text for chunk in chunks])
        orphans = self.index.replace(str(file), content, chunks, vectors, self.settings)
        self.engine.forget(orphans)
        return True

    def _delete_missing(self, path: Path, files: Sequence[Path]) -> int:
        below, present = str(path.expanduser().resolve()), set(map(str, files))
        gone = [
            source
            for source in self.index.sources()
            if source not in present and (source == below or source.startswith(below + "/"))
        ]
        for source in gone:
            self.engine.forget(self.index.delete(source))
        return len(gone)

    def _encode(self, sources: Sequence[str], progress: bool) -> tuple[int, int, float]:
        """Encode what has no KV; documents are marked as they are done."""
        texts = {source: self.index.texts(source) for source in sources}
        total = sum(map(len, texts.values()))
        encoded, tokens, seconds = 0, 0, 0.0
        with tqdm(total=total, desc="prefilling", unit="chunk", disable=not progress) as bar:
            for group in _groups(texts):
                chunks = [text for source in group for text in texts[source]]
                for context in self.contexts:
                    summary = self.engine.encode(chunks, self.head, context=context)
                    tokens += summary.tokens
                    seconds += summary.seconds if summary.encoded else 0.0
                bar.update(len(chunks))
                for source in group:
                    self.index.mark_encoded(source)
                encoded += summary.encoded
        return encoded, tokens, seconds


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
