"""The machine's clock jumps, forth and back, by seconds or by years."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from faults import world
from faults.outcome import Outcome

_YEARS = 60 * 60 * 24 * 365.0


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Ingest, ask, delete and prune so many times, with another time before each step."""
    outcome, real = Outcome("the clock jumps"), time.time
    world.write_documents(folder / "documents")
    for number in range(trials):
        if number % 25 == 0:
            shutil.rmtree(folder / "index", ignore_errors=True)
        now = real()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: max(0.0, now + _jump(chance)))  # noqa: B023
            patch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
            outcome.add(*_tried(folder, chance))
    return [outcome]


def _jump(chance: random.Random) -> float:
    return chance.choice([1, -1]) * chance.choice([0.0, 1.0, 3600.0, _YEARS, 40 * _YEARS])


def _tried(folder: Path, chance: random.Random) -> tuple[int, int, list[str]]:
    documents, found, wrong = folder / "documents", [], 0
    try:
        for path in documents.iterdir():
            os.utime(path, (time.time(), time.time()))
        with world.index(folder / "index", disk_bytes=1 << 20) as rag:
            rag.ingest(documents, progress=False)
            for step in chance.sample(["ask", "delete", "prune"], 3):
                if step == "ask":
                    rag.ask(world.QUESTION, k=6, max_tokens=2)
                    wrong += world.wrong_in_prompt(rag.engine)
                if step == "delete":
                    rag.delete(chance.choice(rag.documents()).source)
                if step == "prune":
                    disk = rag.engine.library.shelf.disk
                    assert disk is not None
                    disk.prune(chance.randrange(100_000))
            rag.ingest(documents, progress=False)
            lost = len(world.TEXTS) - len([one for one in rag.documents() if one.is_encoded])
            wrong += world.wrong_modules(rag.engine)
        found += world.litter(folder / "index" / "kv")
    except Exception as error:
        return 0, wrong, [f"{error!r:.300}"]
    return lost, wrong, found
