"""An ingestion's bars on the terminal: bytes that were read, then tokens that were prefilled.

Knows tqdm; knows no document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The bar does not say what is done with smaller files: that would change too fast to be read.
LONG_BYTES = 1 << 18

# Called by whoever works on a file with what is being done, and the share that is done, 0 to 1.
Say = Callable[[str, float], None]


@contextmanager
def reading(files: Iterable[Path], *, is_shown: bool) -> Iterator[Iterator[tuple[Path, Say]]]:
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


def prefilling(tokens: int, *, is_shown: bool) -> tqdm[Any]:
    """A bar in tokens, with the rate and the time left."""
    return _bar(tokens, "prefilling", "token", is_shown=is_shown)


def _bar(
    total: int, what: str, unit: str, *, is_shown: bool, unit_divisor: int = 1000
) -> tqdm[Any]:
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=unit_divisor,
        disable=not is_shown,
    )


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0  # deleted since it was found; whoever reads it says so
