"""Brings documents into an index, once or whenever a folder changes, and sees that chunks have KV.

Each step keeps what is there already, so an interrupted run goes on where it stopped. Folders are
watched by the watchfiles library (extra "docs").
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate, chain
from os.path import isdir, isfile, realpath  # unlike those of a Path, they never raise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cached_rag.errors import DocumentError, needs_extra
from cached_rag.library.encode import EncodeSummary
from cached_rag.options import require
from cached_rag.rag.chunks import Chunk, embedded
from cached_rag.rag.document import Document, DocumentLimits, assembled
from cached_rag.rag.finding import is_below, is_hidden, is_text, join, look_at, stamp
from cached_rag.rag.folder import IndexFolder
from cached_rag.rag.progress import IngestSummary, ShareDone, Shown, counting, within
from cached_rag.rag.reading_process import ConfinedReader
from cached_rag.rag.search import described
from cached_rag.rag.workers import IngestTask, Preparation, Prepare, content, groups

# How often a watch says that nothing happened.
_TIMEOUT_MS = 1000
# If more files change at a time, the folder is looked through once instead of once a file.
_MOST_FILES = 8

# Called with a path, and whether documents that are gone from below it are to be deleted.
Ingest = Callable[[Path, bool], IngestSummary]
# Kinds of change, with the paths that changed.
Batch = Collection[tuple[object, str]]


class Ingestion:
    """One ingestion into an index, and what it has done so far.

    Attributes:
        limits: on reading a document.
    """

    def __init__(self, folder: IndexFolder, limits: DocumentLimits) -> None:
        folder.agree()
        self.folder, self.index, self.limits = folder, folder.index, limits
        self._began = time.perf_counter()
        self._documents, self._added = 0, 0
        self._skipped: list[tuple[str, str]] = []
        self._done = EncodeSummary()
        # Bytes of KV, where no engine has to be asked.
        self._held: int | None = None
        self._says: Callable[[str], object] = _unsaid  # beside the bar of what is read

    @cached_property
    def preparation(self) -> Preparation:
        """What documents are prepared with. Loads the models, so not before one needs them."""
        folder = self.folder
        self._says("loading models")
        made = Preparation(folder.engine, folder.embedder, folder.settings)
        self._says("")
        return made

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
            path: absolute.
            prepare: has workers read and encode; None for this process.
            inside: a folder out of which no link may lead; None for `path`, wherever that leads.
        """
        found = look_at(path)
        self._skipped += ((str(place), reason) for place, reason in found.unreadable)
        with ConfinedReader(self.limits, inside or path) as reader:
            base = self._called(path, found.files, name, reader)
            files = {join(base, file.relative_to(path)): file for file in found.files}
            for source in [source for source in files if not is_text(source)]:
                odd = str(files.pop(source))
                reason = f"{odd!r}: its name is no text in this system's encoding; rename it"
                self._skipped.append((odd, reason))
            unseen = {join(base, place.relative_to(path)) for place, _ in found.unreadable}
            missing = self._missing(base, {*files, *unseen})
            if prepare is None:
                texts = self._read(files, reader, progress)
            else:
                self._gather(files, prepare, progress)
        gone = missing if delete_missing else []
        deleted = self._delete([*gone, *self._emptied(files)])
        if prepare is None:
            self._encode(texts, progress)
        return self._summary(
            deleted=deleted,
            passed_over=found.passed_over,
            missing=() if delete_missing else tuple(missing),
        )

    def add(
        self, texts: Mapping[str, str], metadata: Mapping[str, object], progress: Shown
    ) -> IngestSummary:
        """Index and encode texts that are in no file; see `CachedRAG.add_texts`."""
        is_named = isinstance(texts, Mapping) and all(
            isinstance(one, str) for pair in texts.items() for one in pair
        )
        require(is_named, 'texts are strings, given by name: {"faq/12": "How is ..."}')
        require(isinstance(metadata, Mapping), 'metadata are values by name: {"year": 2026}')
        known = described(metadata)
        documents = [assembled(name, [(text, known)]) for name, text in texts.items()]
        for one in documents:
            if not one.text:
                raise DocumentError(f"the text {one.source!r} is empty; leave it out")
        self.index.roots.free(texts.keys())
        for one in documents:
            self._update(one.source, one, lambda _: None)
        self._encode({one.source: self.index.texts(one.source) for one in documents}, progress)
        return self._summary()

    def _read(
        self, files: Mapping[str, Path], reader: ConfinedReader, progress: Shown
    ) -> dict[str, list[str]]:
        """Index files that changed; gives all chunks of those that could be read, by source."""
        stamps = {source: stamp(file) for source, file in files.items()}  # as before reading
        changed = {s: f for s, f in files.items() if not self.index.is_as_stamped(s, stamps[s])}
        texts = {source: self.index.texts(source) for source in files.keys() - changed.keys()}
        sizes = [max(0, _size(file)) for file in changed.values()]
        with counting("reading", sum(sizes), progress) as bar:
            self._says = bar.set_postfix_str
            for (source, file), size in zip(changed.items(), sizes, strict=True):
                share_done = within(bar, size)
                try:
                    document = reader.load(file)
                except DocumentError as error:
                    self._skipped.append((str(file), str(error)))
                    share_done(1.0)
                    continue
                is_new = self._update(source, document, share_done)
                self.index.put_stamp(source, stamps[source])
                texts[source] = self.index.texts(source)
                if is_new:
                    self.preparation.engine.register(texts[source])
                share_done(1.0)
        self._says = _unsaid
        return texts

    def _gather(self, files: Mapping[str, Path], prepare: Prepare, progress: Shown) -> None:
        """Index what workers prepare, batch by batch.

        The KV is in the store by then. So encoding finds it, and makes it known to this process's
        catalog; what was lost on the way is computed here.
        """
        started = time.perf_counter()
        tasks = [IngestTask(s, str(file), self.index.digest(s)) for s, file in files.items()]
        with counting("preparing", len(tasks), progress) as bar:
            for batch in prepare(tasks):
                texts = {}
                for made in batch.documents:
                    if made.skipped:
                        self._skipped.append((str(files[made.source]), made.skipped))
                        continue
                    if made.vectors is not None:  # else the index has it as it is
                        self._replace(made.source, made.digest, made.chunks, made.vectors)
                    texts[made.source] = self.index.texts(made.source)
                self._documents += len(texts)
                self._done += EncodeSummary(batch.encoded, tokens=batch.tokens)
                for group in groups(texts):
                    self._finish(group)
                bar.update(len(batch.documents))
                rate = self._done.tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tokens/s")

    def _emptied(self, files: Mapping[str, Path]) -> list[str]:
        """Documents whose files have been emptied: nobody wants anything of them any more."""
        unread = {name for name, _ in self._skipped}
        known = files.keys() & self.index.roots.sources()
        return [one for one in known if str(files[one]) in unread and not _size(files[one])]

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
            return self.index.digest(source) == content(reader.load(file))
        except DocumentError:
            return False

    def _update(self, source: str, document: Document, share_done: ShareDone) -> bool:
        """Index a document, unless it is indexed as it is; says whether it had to."""
        digest = content(document)
        if self.index.digest(source) == digest:
            return False
        chunks = self.preparation.splitter.split(document)
        texts = [chunk.text for chunk in chunks]
        vectors = embedded(self.preparation.embedder, texts, share_done)
        self._replace(source, digest, chunks, vectors)
        return True

    def _replace(
        self, source: str, digest: str, chunks: Sequence[Chunk], vectors: NDArray[np.float32]
    ) -> None:
        """Index a document, and delete the KV that only its old chunks had."""
        settings = self.folder.settings
        self.folder.forget_later(self.index.replace(source, digest, chunks, vectors, settings))
        self._added += 1

    def _missing(self, base: str, present: set[str]) -> list[str]:
        """Documents below `base` that are not there.

        Args:
            present: sources that are there, and those below which nobody could look.
        """
        below = (source for source in self.index.roots.sources() if is_below(source, base))
        return [source for source in below if present.isdisjoint(_above(source))]

    def _delete(self, sources: Sequence[str]) -> int:
        """Delete documents; says how many."""
        for source in sources:
            self.folder.forget_later(self.index.delete(source))
        return len(sources)

    def _encode(self, texts: dict[str, list[str]], progress: Shown) -> None:
        """Encode chunks that have no KV, and mark documents that are done.

        Args:
            texts: all chunks of each document, by its source.
        """
        self._documents = len(texts)
        if texts.keys().isdisjoint(self.index.pending()):
            self._held = self.folder.held_bytes(set(chain.from_iterable(texts.values())))
            if self._held is not None:
                return
        parts = list(groups(texts))
        passes = sum(len(c.ways) if c else 1 for c in self.preparation.contexts)
        register = self.preparation.engine.register
        sizes = [passes * sum(map(register, group.values())) for group in parts]
        with counting("prefilling", sum(sizes), progress) as bar:
            for group, due in zip(parts, accumulate(sizes), strict=True):
                self._finish(group, bar.update)
                bar.update(due - bar.n)  # chunks that had KV already

    def _summary(self, **found: Any) -> IngestSummary:
        """What was done, and what was found besides."""
        held = self._held
        if held is None:
            held = self.preparation.engine.library.shelf.store_bytes()
        return IngestSummary(
            added=self._added,
            unchanged=self._documents - self._added,
            chunks=self.index.count()[1],
            encoded=self._done.encoded,
            tokens=self._done.tokens,
            seconds=time.perf_counter() - self._began,
            skipped=tuple(self._skipped),
            unsent=self._done.unsent,
            stored_bytes=held,
            **found,
        )

    def _finish(
        self,
        documents: Mapping[str, Sequence[str]],
        tokens_done: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Encode the chunks of some documents, and mark these as encoded."""
        self._done += self.preparation.encode([*documents.values()], tokens_done)
        # Chunks that others deleted meanwhile.
        self.folder.forget_later(self.index.orphans([*chain.from_iterable(documents.values())]))
        for source in documents:
            self.index.mark_encoded(source)


def _unsaid(_: str) -> None:
    """There is no bar."""


def _above(source: str) -> Iterator[str]:
    """A source, and those of the folders around it."""
    return accumulate(source.split("/"), lambda above, name: f"{above}/{name}")


def _size(file: Path) -> int:
    """A file's bytes; -1 if it was deleted since it was found, which whoever reads it says."""
    with suppress(OSError):
        return file.stat().st_size
    return -1


def watch(
    path: Path, ingest: Ingest, *, ignored: Path, stop: Event | None = None
) -> Iterator[IngestSummary]:
    """Ingest a folder, and again whatever changes in it; a summary each time. Waits in between.

    Args:
        ignored: a folder whose changes do not count: the index's own.
        stop: ends the iteration when it is set.

    Raises:
        DocumentError: there is no such folder, or it is gone.
        MissingPackageError: watchfiles is not installed.
    """
    with needs_extra("docs", "watching a folder"):
        import watchfiles

    if not isdir(path):
        raise DocumentError(f"there is no folder at {path} to watch; files are ingested without")
    own = realpath(ignored)

    def counts(_: object, name: str) -> bool:
        changed = Path(name)
        below = Path(*changed.parts[len(path.parts) :])
        return not is_hidden(below) and not Path(realpath(changed)).is_relative_to(own)

    changes = watchfiles.watch(
        path,
        watch_filter=counts,
        stop_event=stop,
        rust_timeout=_TIMEOUT_MS,
        yield_on_timeout=True,
    )
    summary = ingest(path, True)
    yield summary
    is_due = True  # what changed until the first batch, which may be empty, was not seen
    for batch in _explained(path, changes):
        changed = _changed(path, {Path(name) for _, name in batch})
        # The first documents of a folder are ingested with it, which gives them their names.
        is_due |= bool(changed) and not summary.added + summary.unchanged
        for target in [path] if is_due else changed:
            summary = _ingested(path, target, ingest)
            if summary.added or summary.deleted or summary.skipped:
                yield summary
        is_due = False


def _explained(path: Path, changes: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from changes
    except OSError as error:
        raise DocumentError(
            f"{path} cannot be watched ({error}); ingest it from time to time instead"
        ) from error


def _ingested(folder: Path, target: Path, ingest: Ingest) -> IngestSummary:
    try:
        return ingest(target, target == folder)
    except DocumentError:
        if target == folder or not isdir(folder):
            raise
        return ingest(folder, True)  # a file that was there a moment ago


def _changed(folder: Path, paths: set[Path]) -> list[Path]:
    """What to ingest again: files that changed; or all, if many did, or one is gone or a folder."""
    if not paths:
        return []
    if len(paths) > _MOST_FILES or not all(map(isfile, paths)):
        return [folder]
    found = {realpath(file): file for file in look_at(folder).files}
    return sorted(found[file] for path in paths if (file := realpath(path)) in found)
