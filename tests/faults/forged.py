"""KV of wrong numbers that somebody else puts into a store, whole and of the right name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from faults import world
from faults.outcome import Outcome

from cached_rag import Engine
from cached_rag.kv.buffer import ModuleKV

KEY = "a secret that others lack"


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try it so many times with a store that has a key."""
    outcome = Outcome("KV that others wrote into a store, with a key")
    with world.engine(folder / "sound", signing_key=KEY) as engine:
        engine.encode(world.TEXTS, context=None)
    for _ in range(trials):
        shutil.copytree(folder / "sound", folder / "kv")
        outcome.add(*tried(folder / "kv", chance, signing_key=KEY))
        shutil.rmtree(folder / "kv")
    return [outcome]


def tried(folder: Path, chance: random.Random, **options: object) -> tuple[int, int, list[str]]:
    """Forge some modules in a store, and use it with these options."""
    with world.engine(folder) as foreign:
        forge(foreign, chance.randint(1, len(world.TEXTS)))
    with world.engine(folder, **options) as engine:
        engine.generate(world.PROMPT, method="reuse", max_tokens=1)
        wrong = world.wrong_in_prompt(engine) + world.wrong_modules(engine)
        summary = engine.encode(world.TEXTS, context=None)
        wrong += world.wrong_modules(engine)
    lost = len(world.TEXTS) - summary.encoded - summary.present
    return lost, wrong, []


def forge(engine: Engine, count: int) -> None:
    """Put so many modules whose keys and values no model computes into an engine's store."""
    behind = engine.library.encoded_after()[0]
    for chunk in list(engine.library.table)[:count]:
        kv = world.right_kv()[chunk.token_ids][0]
        spoilt = ModuleKV(kv.token_ids, kv.start, kv.keys + 1, kv.values - 1)
        engine.library.put(behind, spoilt, chunk.text_digest)
