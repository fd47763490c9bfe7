"""What happens around an index: the disk is full or read-only, files go away while it is open."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from faults import mounts, world
from faults.outcome import Outcome

from cached_rag import CachedRAG, CachedRAGError

Harm = Callable[[Path, random.Random], AbstractContextManager[None]]
_DATABASES = ("index/documents.sqlite", "index/kv/index.sqlite", "index/kv/catalog.sqlite")


def _full(disk: Path, chance: random.Random) -> AbstractContextManager[None]:
    return mounts.full(disk, chance.choice([0, chance.randrange(200_000)]))


def _read_only(disk: Path, _: random.Random) -> AbstractContextManager[None]:
    return mounts.read_only(disk)


def _removing(*names: str) -> Harm:
    @contextlib.contextmanager
    def harm(disk: Path, chance: random.Random):
        path = disk / chance.choice(names)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        yield

    return harm


HARMS: dict[str, Harm] = {
    "the disk is full": _full,
    "the disk is read-only": _read_only,
    "the KV's folder is removed": _removing("index/kv", "index/kv/blobs"),
    "the index is removed": _removing("index"),
    "a database is removed": _removing(*_DATABASES),
}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of `HARMS` so many times; none where no file system can be mounted."""
    if not mounts.can_mount():
        return []
    world.write_documents(folder / "documents")
    with world.index(folder / "sound") as rag:
        for path in sorted((folder / "documents").iterdir())[:6]:
            rag.ingest(path, progress=False)
    outcomes = []
    for what, harm in HARMS.items():
        outcome = Outcome(what)
        for _ in range(trials):
            with mounts.mounted(folder / "disk") as disk:
                shutil.copytree(folder / "sound", disk / "index")
                outcome.add(*_tried(harm, disk, folder / "documents", chance))
        outcomes.append(outcome)
    return outcomes


def _tried(
    harm: Harm, disk: Path, documents: Path, chance: random.Random
) -> tuple[int, int, list[str]]:
    found: list[str] = []
    wrong = lost = 0
    try:
        with ExitStack() as stack:
            is_open = chance.random() < 0.7
            if is_open:
                rag = stack.enter_context(world.index(disk / "index"))
                _asked(rag)
            with harm(disk, chance):
                if not is_open:
                    try:
                        rag = stack.enter_context(world.index(disk / "index"))
                    except CachedRAGError:
                        rag = None
                if rag is not None:
                    # What was opened before has all it needs; what is opened now may have nothing.
                    wrong += _harmed(rag, documents, chance, () if is_open else CachedRAGError)
                    with contextlib.suppress(CachedRAGError):
                        stack.close()
        with world.index(disk / "index") as rag:
            rag.ingest(documents, progress=False)
            lost = len(world.TEXTS) - len([one for one in rag.documents() if one.is_encoded])
            _asked(rag)
            wrong += world.wrong_modules(rag.engine)
        found += world.litter(disk / "index" / "kv")
    except Exception as error:
        found.append(f"{error!r:.300}")
    return max(0, lost), wrong, found


def _harmed(
    rag: CachedRAG, documents: Path, chance: random.Random, may_fail: tuple[()] | type[Exception]
) -> int:
    """Ask and ingest meanwhile, in any order; questions may fail in this way only."""
    wrong = 0
    for step in chance.sample(["ask", "ingest", "ask", "delete"], 4):
        if step == "ask":
            with contextlib.suppress(may_fail):
                _asked(rag)
                wrong += world.wrong_in_prompt(rag.engine)
        with contextlib.suppress(CachedRAGError):
            if step == "ingest":
                rag.ingest(documents, progress=False)
            if step == "delete":
                for one in rag.documents()[:1]:
                    rag.delete(one.source)
    return wrong


def _asked(rag: CachedRAG) -> None:
    rag.ask(world.QUESTION, k=6, max_tokens=2)
