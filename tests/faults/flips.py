"""Damaged files: a bit flipped, a part zeroed, cut off, or exchanged, anywhere in an index."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults import world
from faults.outcome import Outcome

from cached_rag import CachedRAGError

Damage = Callable[[Path, random.Random], None]


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _zero(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    file.write_bytes(data)


def _cut(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])


def _exchange(file: Path, chance: random.Random) -> None:
    others = [one for one in file.parent.parent.rglob(f"*{file.suffix}") if one != file]
    file.write_bytes(chance.choice(others or [file]).read_bytes())


DAMAGES: dict[str, Damage] = {
    "a bit flipped": _flip,
    "512 bytes zeroed": _zero,
    "a file cut short": _cut,
    "a file in place of another": _exchange,
}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of `DAMAGES` so many times, on KV files and databases in turn."""
    shutil.rmtree(folder, ignore_errors=True)
    world.write_documents(folder / "documents")
    with world.index(folder / "sound") as rag:
        rag.ingest(folder / "documents", progress=False)
    outcomes = []
    for what, damage in DAMAGES.items():
        for kind, pattern in (("KV files", "*.safetensors"), ("databases", "*.sqlite")):
            outcome = Outcome(f"{what}, {kind}")
            for _ in range(trials):
                _try(outcome, damage, pattern, folder, chance)
            outcomes.append(outcome)
    return outcomes


def _try(
    outcome: Outcome, damage: Damage, pattern: str, folder: Path, chance: random.Random
) -> None:
    index = folder / "damaged"
    shutil.rmtree(index, ignore_errors=True)
    shutil.copytree(folder / "sound", index)
    damage(chance.choice(sorted(index.rglob(pattern))), chance)
    lost, wrong, found = 0, 0, []
    try:
        with world.index(index) as rag:
            rag.ask(world.QUESTION, k=6, max_tokens=2)
            wrong = world.wrong_in_prompt(rag.engine)
            rag.ingest(folder / "documents", progress=False)
            lost = len(world.TEXTS) - len([one for one in rag.documents() if one.is_encoded])
    except CachedRAGError:
        pass  # an error that says what is wrong is no wrong answer, and nothing is lost by it
    except Exception as error:
        found.append(f"{outcome.fault}: {error!r:.200}")
    outcome.add(max(0, lost), wrong, found)
