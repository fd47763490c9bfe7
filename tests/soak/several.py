"""Several processes on one index at once, and what is left of it afterwards."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from faults import kills, world
from soak.work import Done, run


def _surrounded(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def soak(folder: Path, processes: int, threads: int, seconds: float, seed: int) -> Done:
    """Have them work on an index; then look at what is left."""
    world.write_documents(folder / "documents")
    with world.index(folder / "index") as rag:
        rag.ingest(folder / "documents", progress=False)
        tokens = world.sure_tokens()
        right = rag.engine.generate(world.PROMPT, method="full", max_tokens=tokens).text
    work = partial(run, folder, threads, seconds, right=right)
    whole = Done()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "cached_rag"])  # once, for all that it starts
    # The server that forks them keeps the environment of its start.
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_surrounded, initargs=({**os.environ},)
    ) as pool:
        for done in pool.map(work, [seed * 100 + n for n in range(processes)]):
            whole.counts += done.counts
            whole.wrong += done.wrong
            whole.faults += done.faults
    lost, wrong, found = kills.judged(folder)
    whole.wrong += wrong
    whole.faults += found + [f"{lost} documents are lost"] * bool(lost)
    return whole
