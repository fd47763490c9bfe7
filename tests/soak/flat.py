"""Whether a process keeps something of each request: files, threads, memory, tensors."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from faults import world

from cached_rag import Engine
from cached_rag.backends.machine import return_memory
from cached_rag.errors import ContextOverflowError


@dataclass(frozen=True)
class Size:
    """What a process has.

    Attributes:
        rss: bytes of memory, without what is free in the C library.
        tensors: how many tensors live.
    """

    requests: int
    rss: int
    files: int
    threads: int
    tensors: int


def size(requests: int, process: psutil.Process | None = None) -> Size:
    """The size of this process, or of another, of which the tensors are not known."""
    tensors = 0
    if process is None:
        gc.collect()
        return_memory()
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    known = process or psutil.Process()
    files = known.num_fds() if os.name == "posix" else 0
    return Size(requests, known.memory_info().rss, files, known.num_threads(), tensors)


def sizes(folder: Path, counts: list[int]) -> Iterator[Size]:
    """Ask an engine in all ways in turn; yields its size after so many requests."""
    with world.engine(folder, write_back=True, learn="recurring", sequence_bytes=1 << 20) as engine:
        engine.encode(world.TEXTS, context=None)
        engine.generate(world.PROMPT, max_tokens=1)
        room = engine.model.context_length
        ways: list[Callable[[str], object]] = [
            lambda prompt: engine.generate(prompt, max_tokens=3),
            lambda prompt: engine.generate(prompt, method="full", max_tokens=1),
            lambda prompt: _left(engine, prompt, cancels=True),
            lambda prompt: _left(engine, prompt, cancels=False),
            lambda prompt: engine.generate_batch([prompt, prompt[:100]], max_tokens=2),
            lambda prompt: _refused(engine, prompt, room),
        ]
        for number, way in zip(range(1, counts[-1] + 1), itertools.cycle(ways), strict=False):
            texts = (world.TEXTS[(number + n * n) % 12] for n in range(4))
            way("\n\n".join(texts) + f"\n\nQuestion {number}: {world.QUESTION}")
            if number in counts:
                assert engine.write_back is not None
                engine.write_back.drain()
                yield size(number)


def _left(engine: Engine, prompt: str, *, cancels: bool) -> None:
    """Take one piece of an answer and no more; the garbage collector finds the rest."""
    stream = engine.stream(prompt, max_tokens=20)
    next(stream, None)
    if cancels:
        stream.cancel()


def _refused(engine: Engine, prompt: str, room: int) -> None:
    try:
        engine.generate(prompt, max_tokens=room)
    except ContextOverflowError:
        return
    raise AssertionError("it should not fit")
