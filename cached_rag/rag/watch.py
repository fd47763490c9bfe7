"""Keeps an index in step with a folder, by the watchfiles library (extra "docs")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from cached_rag.errors import DocumentError, needs_extra
from cached_rag.rag.ingest import IngestSummary
from cached_rag.rag.readers import look_at

# How often a watch says that nothing happened.
_TIMEOUT_MS = 1000

# Called with a path, and whether documents that are gone from below it are to be deleted.
Ingest = Callable[[Path, bool], IngestSummary]


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

    if not path.is_dir():
        raise DocumentError(f"there is no folder at {path} to watch; files are ingested without")
    own = ignored.resolve()
    usual = watchfiles.DefaultFilter()
    changes = watchfiles.watch(
        path,
        watch_filter=lambda change, name: (
            usual(change, name) and not Path(name).resolve().is_relative_to(own)
        ),
        stop_event=stop,
        rust_timeout=_TIMEOUT_MS,
        yield_on_timeout=True,
    )
    yield ingest(path, True)
    batch = next(changes, None)  # from here on changes are seen; what changed before is not
    targets = [path]
    while batch is not None:
        for target in targets:
            summary = ingest(target, target == path)
            if summary.added or summary.deleted or summary.skipped:
                yield summary
        batch = next(changes, None)
        targets = _changed(path, {Path(name) for _, name in batch or ()})


def _changed(folder: Path, paths: set[Path]) -> list[Path]:
    """What to ingest again: the files that changed, or all if one is gone or is a folder."""
    if not all(path.is_file() for path in paths):
        return [folder]
    found = {file.resolve() for file in look_at(folder).files}
    return sorted(path for path in paths if path.resolve() in found)
