"""What is said of an ingestion: bars of what was read and prefilled, and a summary at its end.

Knows tqdm; knows no document.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The bar does not say what is done with smaller files: that would change too fast to be read.
LONG_BYTES = 1 << 18

# How long an encoding takes before its bar is drawn: that of a few chunks would only flicker.
_DELAY_S = 0.5

# Called by whoever works on a file with what is being done, and the share that is done, 0 to 1.
Say = Callable[[str, float], None]
# How an encoding shows how far it is: a bar (True), a bar if standard error is a terminal (None),
# nothing (False), or calls with the numbers of tokens that are done and that are to be done.
Progress = bool | Callable[[int, int], object] | None
# How an ingestion does: bars, nothing, or calls with what is done ("reading", in bytes;
# "prefilling", in tokens; "preparing", in documents), how much of it is, and how much there is.
Shown = bool | Callable[[str, int, int], object]


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


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar whose lock is this process's own.

    tqdm's is shared with forked processes: one that is killed while it holds it would have all
    others wait for ever.
    """


Bar.set_lock(threading.RLock())


@contextmanager
def reading(files: Iterable[Path], *, is_shown: Shown) -> Iterator[Iterator[tuple[Path, Say]]]:
    """A bar in bytes over files; gives each file with the `Say` that moves the bar within it."""
    sizes = {file: _size(file) for file in files}
    total = sum(sizes.values())
    with _bar(total, "reading", "B", is_shown=is_shown, unit_divisor=1024) as bar:

        def each() -> Iterator[tuple[Path, Say]]:
            begin = 0
            for file, size in sizes.items():

                def say(what: str, done: float, begin: int = begin, size: int = size) -> None:
                    bar.update(begin + int(done * size) - bar.n)
                    if size >= LONG_BYTES:
                        bar.set_postfix_str(what)

                yield file, say
                begin += size
                bar.set_postfix_str("", refresh=False)
                bar.update(begin - bar.n)

        yield each()


def prefilling(tokens: int, *, is_shown: Shown) -> Any:
    """A bar in tokens, with the rate and the time left."""
    return _bar(tokens, "prefilling", "token", is_shown=is_shown)


def preparing(documents: int, *, is_shown: Shown) -> Any:
    """A bar in documents, with the rate and the time left."""
    return _bar(documents, "preparing", "document", is_shown=is_shown)


@contextmanager
def encode_progress(progress: Progress) -> Iterator[dict[str, Callable[[int], object]]]:
    """The arguments of `Engine.encode` by which it shows how far it is.

    Args:
        progress: True for a bar on standard error, None for one if that is a terminal, False for
            nothing; or a function, called with the numbers of tokens that are done and that are
            to be done, at the beginning and after each batch.
    """
    shown = _without_what(progress) if callable(progress) else progress
    with _bar(None, "prefilling", "token", is_shown=shown, delay=_DELAY_S) as bar:
        yield {"token_progress": bar.update, "token_total": bar.reset}


def _without_what(tell: Callable[[int, int], object]) -> Callable[[str, int, int], object]:
    return lambda _, done, total: tell(done, total)


class _Told:
    """Does as a bar, and tells a function."""

    def __init__(self, tell: Callable[[str, int, int], object], what: str) -> None:
        self._tell, self._what = tell, what

    def reset(self, total: int) -> None:
        self.n, self._total = 0, total
        self._tell(self._what, 0, total)

    def update(self, more: int) -> None:
        self.n += more
        self._tell(self._what, self.n, self._total)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Nothing: the function is told numbers."""


def _bar(
    total: int | None,
    what: str,
    unit: str,
    *,
    is_shown: Shown | None,
    unit_divisor: int = 1000,
    delay: float = 0.0,
) -> Any:
    if callable(is_shown):
        told = _Told(is_shown, what)
        if total is not None:
            told.reset(total)
        return nullcontext(told)
    return Bar(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=unit_divisor,
        delay=delay,
        disable=None if is_shown is None else not is_shown,
    )


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0  # deleted since it was found; whoever reads it says so
