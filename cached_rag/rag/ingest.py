"""Brings documents into an index, and sees that all their chunks have KV.

Each step keeps what is there already, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING

from cached_rag.errors import ConfigError, DocumentError, SlowDocumentError
from cached_rag.library.encode import EncodeSummary
from cached_rag.rag.chunks import Chunk
from cached_rag.rag.document import Document, DocumentLimits, assembled
from cached_rag.rag.finding import absolute, is_below, is_text, join, look_at, stamp
from cached_rag.rag.folder import IndexFolder
from cached_rag.rag.progress import Say, Shown, prefilling, preparing, reading
from cached_rag.rag.reading_process import ConfinedReader
from cached_rag.rag.search import described
from cached_rag.rag.workers import (
    IngestTask,
    Preparation,
    Prepare,
    PreparedDocument,
    content,
    groups,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Files that take longer to read are read behind all others.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class IngestSummary:
    """What an ingestion did.

    Attributes:
        added: number of documents that were new or had changed.
        unchanged: number of documents that were in the index already.
        chunks: number of chunks in the index now.
        encoded: number of chunks that were prefilled.
        tokens: how many tokens that were, in all passes.
        seconds: how long all of it took: looking, reading, embedding and prefilling.
        deleted: number of documents that were deleted.
        skipped: (path, reason) of each file or folder that could not be read.
        passed_over: (suffix, count) of files without a reader, most frequent first.
        unsent: number of KVs that could not be sent to the remote store; ingesting the same again
            sends them.
        stored_bytes: bytes of KV that the index has on disk now.
        missing: documents of the index whose files are gone. Answers go on citing them, unless
            `delete_missing` deletes them.
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
    missing: tuple[str, ...] = ()


class Ingestion:
    """One ingestion into an index.

    Attributes:
        limits: on reading a document.
    """

    def __init__(self, folder: IndexFolder, limits: DocumentLimits) -> None:
        folder.agree()
        self.folder, self.index, self.limits = folder, folder.index, limits

    @cached_property
    def preparation(self) -> Preparation:
        """What documents are prepared with. Loads the models, so not before one needs them."""
        folder = self.folder
        return Preparation(folder.engine, folder.embedder, folder.settings)

    def run(
        self,
        path: Path,
        *,
        name: str | None,
        delete_missing: bool,
        progress: Shown,
        prepare: Prepare | None = None,
        inside: Path | None = None,
    ) -> IngestSummary:
        """Read, index, delete, encode; see `CachedRAG.ingest`.

        Args:
            prepare: has workers read and encode; None for this process.
            inside: a folder out of which no link may lead; None for `path`, wherever that leads.
        """
        began = time.perf_counter()
        path = absolute(path)
        found = look_at(path)
        with ConfinedReader(self.limits, inside or path) as reader:
            base = self._called(path, found.files, name, reader)
            files = {join(base, file.relative_to(path)): file for file in found.files}
            unnamed = [_unnamed(files.pop(source)) for source in list(files) if not is_text(source)]
            known = {
                *files,
                *(join(base, place.relative_to(path)) for place, _ in found.unreadable),
            }
            if prepare is None:
                added, skipped, texts = self._read(files, reader, progress)
        missing = self._missing(base, known)
        if prepare is None:
            deleted = self._delete(missing) if delete_missing else 0
            summary = replace(self._encode(added, texts, progress), skipped=tuple(skipped))
        else:
            summary = self._gather(files, prepare, progress)
            deleted = self._delete(missing) if delete_missing else 0
        unseen = [(str(place), reason) for place, reason in found.unreadable]
        return replace(
            summary,
            seconds=time.perf_counter() - began,
            deleted=deleted,
            skipped=(*unseen, *unnamed, *summary.skipped),
            passed_over=found.passed_over,
            missing=() if delete_missing else tuple(missing),
        )

    def add(
        self, texts: Mapping[str, str], metadata: Mapping[str, object], progress: Shown
    ) -> IngestSummary:
        """Index and encode texts that are in no file; see `CachedRAG.add_texts`."""
        began = time.perf_counter()
        if not isinstance(texts, Mapping):
            raise ConfigError('texts are given by name: {"faq/12": "How is ..."}')
        known = described(metadata)
        documents = [assembled(name, [(text, known)]) for name, text in texts.items()]
        for one in documents:
            self.index.roots.check_free(one.source)
            if not one.text:
                raise DocumentError(f"the text {one.source!r} is empty; leave it out")
        self.index.roots.forget(one.source for one in documents)
        added = sum(self._update(one.source, one, lambda *_: None) for one in documents)
        chunks = {one.source: self.index.texts(one.source) for one in documents}
        summary = self._encode(added, chunks, progress)
        return replace(summary, seconds=time.perf_counter() - began)

    def _read(
        self, files: Mapping[str, Path], reader: ConfinedReader, progress: Shown
    ) -> tuple[int, list[tuple[str, str]], dict[str, list[str]]]:
        """Index files that changed: their number, files skipped and why, all chunks by source."""
        stamps = {source: stamp(file) for source, file in files.items()}  # as before reading
        changed = {s: f for s, f in files.items() if not self.index.is_as_stamped(s, stamps[s])}
        texts = {source: self.index.texts(source) for source in files.keys() - changed.keys()}
        added, skipped = 0, []
        for source, found, say in self._loaded(changed, reader, progress):
            if isinstance(found, DocumentError):
                skipped.append((str(files[source]), str(found)))
                self._drop_emptied(source, files[source])
                continue
            is_new = self._update(source, found, say)
            self.index.put_stamp(source, stamps[source])
            texts[source] = self.index.texts(source)
            added += is_new
            if is_new:
                say("counting tokens", 1.0)
                self.preparation.engine.register(texts[source])
        return added, skipped, texts

    def _loaded(
        self, files: Mapping[str, Path], reader: ConfinedReader, progress: Shown
    ) -> Iterator[tuple[str, Document | DocumentError, Say]]:
        """Files as they are read; those that take long come last, so that no other one waits."""
        slow = {}
        with reading(files.values(), is_shown=progress) as begun:
            for source, (file, say) in zip(files, begun, strict=True):
                say("reading", 0.0)
                try:
                    found = _load(reader, file, _PATIENCE_S)
                except SlowDocumentError:
                    slow[source] = file
                else:
                    yield source, found, say
            for source, file in slow.items():
                yield source, _load(reader, file, None), lambda *_: None

    def _gather(
        self, files: Mapping[str, Path], prepare: Prepare, progress: Shown
    ) -> IngestSummary:
        """Index what workers prepare, batch by batch.

        The KV is in the store by then. So encoding finds it, and makes it known to this process's
        catalog; what was lost on the way is computed here.
        """
        started = time.perf_counter()
        tasks = [IngestTask(s, str(file), self.index.digest(s)) for s, file in files.items()]
        added, read, done, skipped = 0, 0, EncodeSummary(), []
        with preparing(len(tasks), is_shown=progress) as bar:
            for batch in prepare(tasks):
                for left_out in (document for document in batch.documents if document.skipped):
                    skipped.append((str(files[left_out.source]), left_out.skipped))
                    self._drop_emptied(left_out.source, files[left_out.source])
                taken = [document for document in batch.documents if not document.skipped]
                added, read = added + sum(map(self._take, taken)), read + len(taken)
                texts = {document.source: self.index.texts(document.source) for document in taken}
                done += EncodeSummary(batch.encoded, tokens=batch.tokens)
                done = sum((self._finish(*part) for part in _parts(texts)), done)
                bar.update(len(batch.documents))
                rate = done.tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tokens/s")
        stored_bytes = self.preparation.engine.library.shelf.store_bytes()
        summary = self._summary(added, read, done, stored_bytes)
        return replace(summary, skipped=tuple(skipped))

    def _drop_emptied(self, source: str, file: Path) -> None:
        """Delete a document whose file has been emptied; of others that cannot be read, all stays.

        Whoever empties a file wants nothing of it any more.
        """
        with suppress(OSError):
            if file.stat().st_size == 0:
                self._delete([source])

    def _take(self, made: PreparedDocument) -> bool:
        """Index what a worker made of a document; says whether the index had to change."""
        if made.vectors is None:
            return False
        self._replace(made.source, made.digest, made.chunks, made.vectors)
        return True

    def _called(
        self, path: Path, files: Sequence[Path], name: str | None, reader: ConfinedReader
    ) -> str:
        """The source of an absolute path in the index."""
        roots = self.index.roots
        root = roots.choose(path, files, name, partial(self._is_unchanged, reader))
        self._delete(roots.absorb(root))
        return root.source(path) or root.name

    def _is_unchanged(self, reader: ConfinedReader, source: str, file: Path) -> bool:
        if not is_text(source):  # no document is called so
            return False
        try:
            return self.index.holds(source, content(reader.load(file, _PATIENCE_S)))
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
        self._replace(source, digest, chunks, vectors)
        return True

    def _replace(
        self, source: str, digest: str, chunks: Sequence[Chunk], vectors: NDArray[np.float32]
    ) -> None:
        """Index a document, and delete the KV that only its old chunks had."""
        settings = self.folder.settings
        self.folder.forget_later(self.index.replace(source, digest, chunks, vectors, settings))

    def _missing(self, base: str, present: set[str]) -> list[str]:
        """Documents below `base` that are not there.

        Args:
            present: sources that are there, and those below which nobody could look.
        """
        below = (source for source in self.index.sources() if is_below(source, base))
        return [source for source in below if present.isdisjoint(_above(source))]

    def _delete(self, sources: Sequence[str]) -> int:
        """Delete documents; says how many."""
        for source in sources:
            self.folder.forget_later(self.index.delete(source))
        return len(sources)

    def _encode(self, added: int, texts: dict[str, list[str]], progress: Shown) -> IngestSummary:
        """Encode chunks that have no KV, and mark documents that are done.

        Args:
            added: how many of the documents were new or had changed.
            texts: all chunks of each document, by its source.
        """
        stored_bytes = self._held_bytes(texts)
        if stored_bytes is not None:
            return self._summary(added, len(texts), EncodeSummary(), stored_bytes)
        parts = list(_parts(texts))
        passes = sum(len(c.ways) if c else 1 for c in self.preparation.contexts)
        register = self.preparation.engine.register
        sizes = [passes * sum(map(register, documents)) for _, documents in parts]
        done = EncodeSummary()
        with prefilling(sum(sizes), is_shown=progress) as bar:
            for (group, documents), due in zip(parts, accumulate(sizes), strict=True):
                done += self._finish(group, documents, bar.update)
                bar.update(due - bar.n)  # chunks that had KV already
        return self._summary(
            added, len(texts), done, self.preparation.engine.library.shelf.store_bytes()
        )

    def _held_bytes(self, texts: Mapping[str, Sequence[str]]) -> int | None:
        """Bytes of KV on disk, if that of these documents is there; None if it may not be."""
        if texts.keys().isdisjoint(self.index.pending()):
            return self.folder.held_bytes({text for chunks in texts.values() for text in chunks})
        return None

    def _summary(
        self, added: int, read: int, done: EncodeSummary, stored_bytes: int
    ) -> IngestSummary:
        return IngestSummary(
            added=added,
            unchanged=read - added,
            chunks=self.index.count()[1],
            encoded=done.encoded,
            tokens=done.tokens,
            seconds=0.0,  # whoever asked counts them
            unsent=done.unsent,
            stored_bytes=stored_bytes,
        )

    def _finish(
        self,
        group: Sequence[str],
        documents: Sequence[Sequence[str]],
        tokens_done: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """Encode the chunks of some documents, and mark these as encoded."""
        done = self.preparation.encode(documents, tokens_done)
        # Chunks that others deleted meanwhile.
        self.folder.forget_later(self.index.orphans([*chain.from_iterable(documents)]))
        for source in group:
            self.index.mark_encoded(source)
        return done


def _above(source: str) -> Iterator[str]:
    """A source, and those of the folders around it."""
    return accumulate(source.split("/"), lambda above, name: f"{above}/{name}")


def _load(reader: ConfinedReader, file: Path, seconds: float | None) -> Document | DocumentError:
    """A document, or why it cannot be read.

    Raises:
        SlowDocumentError: it takes more than these seconds.
    """
    try:
        return reader.load(file, seconds)
    except SlowDocumentError:
        raise
    except DocumentError as error:
        return error


def _unnamed(file: Path) -> tuple[str, str]:
    reason = f"{str(file)!r}: its name is no text in this system's encoding; rename it"
    return str(file), reason


def _parts(
    texts: Mapping[str, Sequence[str]],
) -> Iterator[tuple[list[str], list[Sequence[str]]]]:
    """Documents in groups that are encoded together, and the chunks of each."""
    for group in groups(texts):
        yield group, [texts[source] for source in group]
