"""What a store of many chunks costs: they are really encoded and written, a hundred to 10^6.

Chunks are short, so that many fit a disk; what depends on their number does not depend on their
length: opening the store, what a process knows of each chunk, finding chunks in a prompt. Bytes and
time of the KV itself grow with the tokens: `scale.py` does the sums.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError, StoreError
from cached_rag.evaluation.timing import NEW_PROMPTS
from docs.experiments.loading import forget_pages

# Chunks in one piece of encoding, between two calls of `progress`.
_PIECE = 2000
_MB = 1e6
_FIGURES = ("match_ms", "load_ms", "ttft_ms")


@dataclass(frozen=True)
class StoredRow:
    """A store with so many chunks, opened by an engine that knows none of them.

    Attributes:
        tokens_per_s: of encoding the chunks that this row has more than the last one.
        disk_gb: of all files in the folder.
        chunk_kb: of them, for each chunk.
        open_ms: until the engine has read which chunks there are.
        known_kb: memory that it took, for each chunk.
        match_ms, load_ms, ttft_ms: medians over prompts with chunks drawn by chance: finding them,
            reading their KV (from disk, or the system's cache), and the first token.
        full_ms: the first token of the same prompts by full prefill.
    """

    chunks: int
    tokens_per_s: float
    disk_gb: float
    chunk_kb: float
    open_ms: float
    known_kb: float
    match_ms: float
    load_ms: float
    ttft_ms: float
    full_ms: float


def bench_stored(
    model: Backend,
    folder: Path,
    counts: Sequence[int],
    *,
    per_prompt: int = 16,
    prompts: int = 9,
    progress: Callable[[int], object] = lambda _: None,
) -> list[StoredRow]:
    """Fill a store in `folder` up to each of the counts, and ask of it each time.

    Args:
        per_prompt: chunks in a prompt.
        prompts: how many are asked, after one to warm up.
        progress: called with the number of chunks encoded since it was called last.

    Raises:
        ConfigError: counts that do not grow, or are less than a prompt's chunks.
        StoreError: a prompt did not find its chunks.
        StoreFullError: the disk has no room for them.
    """
    if list(counts) != sorted({*counts}) or not counts or counts[0] < per_prompt:
        raise ConfigError(
            f"numbers of chunks must grow, from {per_prompt} (the chunks of a prompt), not {counts}"
        )
    settings = dataclasses.replace(NEW_PROMPTS, path=str(folder), write_back=False)
    rows, done = [], 0
    for count in counts:
        with Engine(model, settings) as engine:
            rate = _encode(engine, range(done, count), progress)
        done = count
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        forget_pages(folder)
        before, clock = psutil.Process().memory_info().rss, time.perf_counter()
        with Engine(model, settings) as engine:
            engine.library.refresh()
            opened = time.perf_counter() - clock
            known = psutil.Process().memory_info().rss - before
            found = _ask(engine, count, per_prompt, prompts)
        rows.append(
            StoredRow(
                chunks=count,
                tokens_per_s=rate,
                disk_gb=size / _MB / 1000,
                chunk_kb=size / 1000 / count,
                open_ms=1000 * opened,
                known_kb=known / 1000 / count,
                **found,
            )
        )
    return rows


def chunk_text(number: int) -> str:
    """A chunk that no other number has: as few tokens as the 32 characters that matching needs."""
    return f"Number {number:05d}: international organizations"


def _encode(engine: Engine, numbers: range, progress: Callable[[int], object]) -> float:
    """Encode the chunks; returns tokens a second."""
    tokens, clock = 0, time.perf_counter()
    for begin in numbers[::_PIECE]:
        some = range(begin, min(begin + _PIECE, numbers.stop))
        tokens += engine.encode([chunk_text(number) for number in some], context=None).tokens
        progress(len(some))
    return tokens / (time.perf_counter() - clock)


def _ask(engine: Engine, count: int, per_prompt: int, prompts: int) -> dict[str, float]:
    """Medians of what prompts report."""
    rng, found = random.Random(0), []
    for _ in range(prompts + 1):
        texts = [chunk_text(number) for number in rng.sample(range(count), per_prompt)]
        prompt = "\n\n".join([*texts, "Which numbers are there?"])
        reports = {way: _report(engine, prompt, way) for way in ("full", "auto")}
        if reports["auto"].modules_hit != per_prompt:
            raise StoreError(
                f"{reports['auto'].modules_hit} of {per_prompt} chunks were found in a prompt "
                f"({'; '.join(reports['auto'].notes)}); measure again in an empty folder"
            )
        figures = {name: getattr(reports["auto"], name) for name in _FIGURES}
        found.append(figures | {"full_ms": reports["full"].ttft_ms})
    return {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}


def _report(engine: Engine, prompt: str, method: str) -> Report:
    return engine.generate(prompt, GenerationConfig(method=method, max_tokens=1)).report
