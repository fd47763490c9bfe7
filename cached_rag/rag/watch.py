"""Keeps an index in step with a folder, by the watchfiles library (extra "docs")."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from os.path import isdir, isfile  # unlike those of a Path, they never raise
from pathlib import Path
from threading import Event

from cached_rag.errors import DocumentError, needs_extra
from cached_rag.rag.finding import is_hidden, look_at
from cached_rag.rag.ingest import IngestSummary

# How often a watch says that nothing happened.
_TIMEOUT_MS = 1000
# If more files change at a time, the folder is looked through once instead of once a file.
_MOST_FILES = 8

# Called with a path, and whether documents that are gone from below it are to be deleted.
Ingest = Callable[[Path, bool], IngestSummary]
# Kinds of change, with the paths that changed.
Batch = Collection[tuple[object, str]]


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
    own = ignored.resolve()

    def counts(_: object, name: str) -> bool:
        changed = Path(name)
        below = Path(*changed.parts[len(path.parts) :])
        return not is_hidden(below) and not changed.resolve().is_relative_to(own)

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
    found = {file.resolve(): file for file in look_at(folder).files}
    return sorted(found[file] for path in paths if (file := path.resolve()) in found)
