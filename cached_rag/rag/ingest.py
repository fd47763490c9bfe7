"""Brings documents into an index, and sees that all their chunks have KV.

Each step keeps what is there already, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from cached_rag.errors import DocumentError
from cached_rag.library.encode import EncodeSummary
from cached_rag.rag.confined import ConfinedReader
from cached_rag.rag.document import Document
from cached_rag.rag.finding import look_at
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.preparing import Preparation, content, groups
from cached_rag.rag.progress import Say, Shown, prefilling, preparing, reading
from cached_rag.rag.roots import absolute, is_below, is_text, join
from cached_rag.rag.workers import IngestTask, Prepare, PreparedDocument


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
        skipped: (path, reason) of each file or folder that could not be read.
        passed_over: (suffix, count) of files without a reader, most frequent first.
        unsent: number of KVs that could not be sent to the remote store; ingesting the same again
            sends them.
        stored_bytes: bytes of KV that the index has on disk now.
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
    unsent: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True)
class Ingestion:
    """What an ingestion works with.

    Attributes:
        settings: the index's, if it has none yet.
        forget: given texts that no document has any more, deletes their KV.
        limits: on reading a document.
    """

    index: DocumentIndex
    preparation: Preparation
    settings: Mapping[str, str]
    forget: Callable[[Sequence[str]], object]
    limits: DocumentLimits

    def run(
        self,
        path: Path,
        *,
        name: str | None,
        delete_missing: bool,
        progress: Shown,
        prepare: Prepare | None = None,
    ) -> IngestSummary:
        """Read, index, delete, encode; see `CachedRAG.ingest`.

        Args:
            prepare: has workers read and encode; None for this process.
        """
        path = absolute(path)
        found = look_at(path)
        with ConfinedReader(self.limits) as reader:
            base = self._called(path, found.files, name, reader)
            files = {join(base, file.relative_to(path)): file for file in found.files}
            unnamed = [_unnamed(files.pop(source)) for source in list(files) if not is_text(source)]
            known = {
                *files,
                *(join(base, place.relative_to(path)) for place, _ in found.unreadable),
            }
            if prepare is None:
                added, skipped, texts = self._read(files, reader, progress)
        if prepare is None:
            deleted = self._delete_missing(base, known) if delete_missing else 0
            summary = replace(self._encode(added, texts, progress), skipped=tuple(skipped))
        else:
            summary = self._gather(files, prepare, progress)
            deleted = self._delete_missing(base, known) if delete_missing else 0
        unseen = [(str(place), reason) for place, reason in found.unreadable]
        left_out = (*unseen, *unnamed, *summary.skipped)
        return replace(summary, deleted=deleted, skipped=left_out, passed_over=found.passed_over)

    def add(self, documents: Sequence[Document], *, progress: Shown) -> IngestSummary:
        """Index and encode documents that are in memory."""
        added = sum(self._update(one.source, one, lambda *_: None) for one in documents)
        texts = {one.source: self.index.texts(one.source) for one in documents}
        return self._encode(added, texts, progress)

    def _read(
        self, files: Mapping[str, Path], reader: ConfinedReader, progress: Shown
    ) -> tuple[int, list[tuple[str, str]], dict[str, list[str]]]:
        """Index files that changed: their number, files skipped and why, all chunks by source."""
        added, skipped, texts = 0, [], {}
        with reading(files.values(), is_shown=progress) as begun:
            for source, (file, say) in zip(files, begun, strict=True):
                try:
                    say("reading", 0.0)
                    added += self._update(source, reader.load(file), say)
                except DocumentError as error:
                    skipped.append((str(file), str(error)))
                    self._drop_emptied(source, file)
                    continue
                say("counting tokens", 1.0)
                texts[source] = self.index.texts(source)
                self.preparation.engine.register(texts[source])  # counts their tokens
        return added, skipped, texts

    def _gather(
        self, files: Mapping[str, Path], prepare: Prepare, progress: Shown
    ) -> IngestSummary:
        """Index what workers prepare, batch by batch.

        The KV is in the store by then. So encoding finds it, and makes it known to this process's
        catalog; what was lost on the way is computed here.
        """
        started = time.perf_counter()
        tasks = [IngestTask(s, str(file), self.index.digest(s)) for s, file in files.items()]
        added, unchanged, encoded, tokens, unsent, skipped = 0, 0, 0, 0, 0, []
        with preparing(len(tasks), is_shown=progress) as bar:
            for batch in prepare(tasks):
                for left_out in (document for document in batch.documents if document.skipped):
                    skipped.append((str(files[left_out.source]), left_out.skipped))
                    self._drop_emptied(left_out.source, files[left_out.source])
                read = [document for document in batch.documents if not document.skipped]
                new = sum(map(self._take, read))
                added, unchanged = added + new, unchanged + len(read) - new
                texts = {document.source: self.index.texts(document.source) for document in read}
                done = sum((self._finish(*part) for part in _parts(texts)), EncodeSummary())
                encoded += batch.encoded + done.encoded
                tokens += batch.tokens + done.tokens
                unsent += done.unsent
                bar.update(len(batch.documents))
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
        return IngestSummary(
            added=added,
            unchanged=unchanged,
            chunks=self.index.count()[1],
            encoded=encoded,
            tokens=tokens,
            seconds=time.perf_counter() - started,
            skipped=tuple(skipped),
            unsent=unsent,
            stored_bytes=self.preparation.engine.library.store_bytes(),
        )

    def _drop_emptied(self, source: str, file: Path) -> None:
        """Delete a document whose file has been emptied; of others that cannot be read, all stays.

        Whoever empties a file wants nothing of it any more.
        """
        with suppress(OSError):
            if file.stat().st_size == 0:
                self.forget(self.index.delete(source))

    def _take(self, made: PreparedDocument) -> bool:
        """Index what a worker made of a document; says whether the index had to change."""
        if made.vectors is None:
            return False
        old = self.index.replace(made.source, made.digest, made.chunks, made.vectors, self.settings)
        self.forget(old)
        return True

    def _called(
        self, path: Path, files: Sequence[Path], name: str | None, reader: ConfinedReader
    ) -> str:
        """The source of an absolute path in the index."""
        roots = self.index.roots
        root = roots.choose(path, files, name, partial(self._is_unchanged, reader))
        for source in roots.absorb(root):
            self.forget(self.index.delete(source))
        return root.source(path) or root.name

    def _is_unchanged(self, reader: ConfinedReader, source: str, file: Path) -> bool:
        if not is_text(source):  # no document is called so
            return False
        try:
            return self.index.holds(source, content(reader.load(file)))
        except DocumentError:
            return False

    def _update(self, source: str, document: Document, say: Say) -> bool:
        """Index a document, unless it is indexed as it is; says whether it had to."""
        digest = content(document)
        if self.index.holds(source, digest):
            return False
        say("splitting", 0.0)
        chunks = self.preparation.splitter.split(document)
        vectors = self.preparation.embedded([chunk.text for chunk in chunks], say)
        self.forget(self.index.replace(source, digest, chunks, vectors, self.settings))
        return True

    def _delete_missing(self, base: str, present: set[str]) -> int:
        """Delete documents below `base` that are not there; says how many.

        Args:
            present: sources that are there, and those below which nobody could look.
        """
        below = (source for source in self.index.sources() if is_below(source, base))
        gone = [source for source in below if present.isdisjoint(_above(source))]
        for source in gone:
            self.forget(self.index.delete(source))
        return len(gone)

    def _encode(self, added: int, texts: dict[str, list[str]], progress: Shown) -> IngestSummary:
        """Encode chunks that have no KV, and mark documents that are done.

        Args:
            added: how many of the documents were new or had changed.
            texts: all chunks of each document, by its source.
        """
        parts = list(_parts(texts))
        passes = sum(len(c.ways) if c else 1 for c in self.preparation.contexts)
        sizes = [passes * self.preparation.engine.register(chunks) for _, chunks in parts]
        done = EncodeSummary()
        with prefilling(sum(sizes), is_shown=progress) as bar:
            for (group, chunks), due in zip(parts, accumulate(sizes), strict=True):
                one = self._finish(group, chunks, bar.update)
                done += one if one.encoded else replace(one, seconds=0.0)  # it only looked
                bar.update(due - bar.n)  # chunks that had KV already
        return IngestSummary(
            added=added,
            unchanged=len(texts) - added,
            chunks=self.index.count()[1],
            encoded=done.encoded,
            tokens=done.tokens,
            seconds=done.seconds,
            unsent=done.unsent,
            stored_bytes=self.preparation.engine.library.store_bytes(),
        )

    def _finish(
        self,
        group: Sequence[str],
        chunks: Sequence[str],
        tokens_done: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """Encode the chunks of some documents, and mark these as encoded."""
        done = self.preparation.encode(chunks, tokens_done)
        self.forget(self.index.orphans(chunks))  # chunks that others deleted meanwhile
        for source in group:
            self.index.mark_encoded(source)
        return done


def _above(source: str) -> Iterator[str]:
    """A source, and those of the folders around it."""
    return accumulate(source.split("/"), lambda above, name: f"{above}/{name}")


def _unnamed(file: Path) -> tuple[str, str]:
    reason = f"{str(file)!r}: its name is no text in this system's encoding; rename it"
    return str(file), reason


def _parts(texts: Mapping[str, Sequence[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Documents in groups that are encoded together, each with all their chunks."""
    for group in groups(texts):
        yield group, [text for source in group for text in texts[source]]
