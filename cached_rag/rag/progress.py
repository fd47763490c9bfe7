"""What is said of an ingestion: bars of what was read and prefilled, and a summary at its end.

Knows tqdm; knows no document.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

# How long an encoding takes before its bar is drawn: that of a few chunks would only flicker.
_DELAY_S = 0.5
# Of how many files that were skipped a summary says why.
_NAMED = 3

# Called by whoever works on a file with the share of it that is done, 0 to 1.
ShareDone = Callable[[float], object]
# How an encoding shows how far it is: a bar (True), a bar if standard error is a terminal (None),
# nothing (False), or calls with the numbers of tokens that are done and that are to be done.
Progress = bool | Callable[[int, int], object] | None
# How an ingestion does: bars, nothing, or calls with what is done (one of those below), how much of
# it is, and how much there is.
Shown = bool | Callable[[str, int, int], object]
_UNITS = {"reading": "B", "prefilling": "token", "preparing": "document"}


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

    def to_line(self) -> str:
        """All of it in one line; of files that are skipped, passed over or gone, their number."""
        passed = sum(count for _, count in self.passed_over)
        counts = (
            ("skipped", len(self.skipped)),
            ("passed over", passed),
            ("missing", len(self.missing)),
        )
        left = [f", {n} {what} (see `{what.replace(' ', '_')}`)" for what, n in counts if n]
        return (
            f"{self.added} documents added, {self.unchanged} unchanged, {self.deleted} deleted"
            f"{''.join(left)}; {self.chunks} chunks, {self.encoded} prefilled now ({self.tokens} "
            f"tokens in all passes) in {self.seconds:.1f} s; the index has "
            f"{self.stored_bytes / 2**20:.0f} MiB of KV"
        )

    def __str__(self) -> str:
        """The line, and below it the first files that were skipped, each with the reason."""
        named = [f"skipped {reason}" for _, reason in self.skipped[:_NAMED]]
        return "\n".join([self.to_line(), *named])


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar whose lock is this process's own.

    tqdm's is shared with forked processes: one that is killed while it holds it would have all
    others wait for ever.
    """


Bar.set_lock(threading.RLock())


def within(bar: Any, size: int) -> ShareDone:
    """What moves a bar in bytes within the next file, of so many bytes."""
    begin = bar.n
    return lambda done: bar.update(begin + int(done * size) - bar.n)


@contextmanager
def encode_progress(progress: Progress) -> Iterator[dict[str, Callable[[int], object]]]:
    """The arguments of `Engine.encode` by which it shows how far it is.

    Args:
        progress: True for a bar on standard error, None for one if that is a terminal, False for
            nothing; or a function, called with the numbers of tokens that are done and that are
            to be done, at the beginning and after each batch.
    """
    shown = (lambda _, *counts: progress(*counts)) if callable(progress) else progress
    with counting("prefilling", None, shown, _DELAY_S) as bar:
        yield {"token_progress": bar.update, "token_total": bar.reset}


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

    def set_postfix_str(self, text: str) -> None:
        """Nothing: the function is told numbers."""


def counting(what: str, total: int | None, is_shown: Shown | None, delay: float = 0.0) -> Any:
    """A bar with the rate and the time left; or what does as one.

    Args:
        what: is counted, see `Shown`.
        delay: how many seconds pass before it is drawn.
    """
    if callable(is_shown):
        told = _Told(is_shown, what)
        if total is not None:
            told.reset(total)
        return nullcontext(told)
    unit = _UNITS[what]
    return Bar(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=1024 if unit == "B" else 1000,
        delay=delay,
        # A program without a terminal may have no standard error.
        disable=sys.stderr is None or (None if is_shown is None else not is_shown),
    )
