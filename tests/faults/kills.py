"""kill -9 at random moments of ingestion, eviction, pruning and background encoding."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import world
from faults.outcome import Outcome

Work = Callable[[Path, random.Random], None]


def _ingest(folder: Path, chance: random.Random) -> None:
    documents = folder / "documents"
    while True:
        with world.index(folder / "index") as rag:
            rag.ingest(documents, progress=False)
            for one in chance.sample(rag.documents(), 3):
                rag.delete(one.source)


def _evict(folder: Path, chance: random.Random) -> None:
    with world.engine(folder / "kv", disk_bytes=60_000, memory_bytes=1) as store:
        while True:
            store.encode(chance.sample(world.TEXTS, 4), context=None)


def _prune(folder: Path, chance: random.Random) -> None:
    with world.engine(folder / "kv") as store:
        assert store.library.shelf.disk is not None
        while True:
            store.encode(chance.sample(world.TEXTS, 4), context=None)
            store.library.shelf.disk.prune(chance.choice([0, 30_000, 90_000]))
            store.forget(chance.sample(world.TEXTS, 2))


def _background(folder: Path, chance: random.Random) -> None:
    with world.engine(folder / "kv", write_back=True) as store:
        while True:
            store.register(chance.sample(world.TEXTS, 6))
            store.generate(world.PROMPT, max_tokens=1)
            store.forget(chance.sample(world.TEXTS, 3))


WORKS: dict[str, Work] = {
    "kill -9 while documents are ingested and deleted": _ingest,
    "kill -9 while KV is encoded and evicted": _evict,
    "kill -9 while KV is encoded, pruned and forgotten": _prune,
    "kill -9 while texts are encoded in the background": _background,
}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of `WORKS` so many times."""
    return [_tried(fault, work, trials, folder, chance) for fault, work in WORKS.items()]


def _tried(fault: str, work: Work, trials: int, folder: Path, chance: random.Random) -> Outcome:
    outcome = Outcome(fault)
    world.right_kv()
    for number in range(trials):
        if number % 25 == 0:  # else the same folder goes on from one kill to the next
            shutil.rmtree(folder, ignore_errors=True)
            world.write_documents(folder / "documents")
        killed(work, folder, random.Random(chance.random()), chance.uniform(0.01, 0.6))
        outcome.add(*judged(folder))
    return outcome


def killed(work: Work, folder: Path, chance: random.Random, seconds: float) -> None:
    child = os.fork()
    if not child:
        try:
            os.close(1)
            work(folder, chance)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"


def judged(folder: Path) -> tuple[int, int, list[str]]:
    """Texts lost, modules wrong, and other faults, after everything was opened again."""
    index = folder / "index"
    store = index / "kv" if index.exists() else folder / "kv"
    if not store.exists():
        return 0, 0, []
    found = world.litter(store)
    lost = wrong = 0
    if index.exists():
        with world.index(index) as rag:
            rag.ingest(folder / "documents", progress=False)
            whole = [one for one in rag.documents() if one.is_encoded]
            lost = len(world.TEXTS) - len(whole)
            wrong = world.wrong_modules(rag.engine)
    else:
        with world.engine(store) as engine:
            wrong = world.wrong_modules(engine)
    return lost, wrong, found
