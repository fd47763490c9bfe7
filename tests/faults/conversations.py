"""Conversations that outlive the process: damaged on disk, and killed while they are written."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path

from conftest import ask
from faults import flips, kills, world
from faults.outcome import Outcome

from cached_rag import CachedRAGError, Engine, StoreConfig
from cached_rag.backends.prompt_text import Rendered
from cached_rag.engine.decoding import Generation
from cached_rag.kv import holdings
from cached_rag.kv.kept import KeptPrompts

KILLED = "kill -9 while conversations are kept and texts forgotten"
_BYTES = 1 << 26
_NUM = 6  # of conversations, each of the text with its number


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Damage what lies on disk in each way of `flips`, and kill who writes it."""
    shutil.rmtree(folder, ignore_errors=True)
    with _engine(folder / "sound") as engine:
        for number in range(_NUM):
            engine.generate(_turns(number)[0], **_OPTIONS)
    return [*_damaged(trials, folder, chance), _killed(trials, folder / "killed", chance)]


_OPTIONS = {"max_tokens": 4, "ignore_eos": True, "method": "prefix", "logprobs": 0}
_ROUNDING = 1e-3


def _engine(folder: Path) -> Engine:
    return world.engine(folder, sequence_bytes=_BYTES)


@functools.cache
def _turns(number: int) -> list[list[dict[str, str]]]:
    """A conversation's first turn, and its second one."""
    first = ask(*world.TEXTS[number::_NUM], *world.TEXTS[number::_NUM])
    with _clean() as engine:
        said = {"role": "assistant", "content": engine.generate(first, **_OPTIONS).text}
    return [first, [*first, said, {"role": "user", "content": "And then?"}]]


@functools.cache
def _answer(number: int) -> Generation:
    """To the second turn, by a model that keeps nothing."""
    with _clean() as engine:
        return engine.generate(_turns(number)[1], **_OPTIONS)


def _is_right(made: Generation, right: Generation) -> bool:
    """Whether an answer is the same, and as likely: tokens alone say little of a random model."""
    pairs = zip(made.logprobs, right.logprobs, strict=True)
    is_near = all(abs(one.logprob - other.logprob) < _ROUNDING for one, other in pairs)
    return made.token_ids == right.token_ids and is_near


def _clean() -> Engine:
    return Engine(world.model(), StoreConfig(sequence_bytes=0, write_back=False))


def wrong_answers(folder: Path) -> tuple[int, int]:
    """How many conversations go on with another answer, and how many went on from what was kept."""
    with _engine(folder) as engine:
        made = [engine.generate(_turns(number)[1], **_OPTIONS) for number in range(_NUM)]
    wrong = sum(not _is_right(one, _answer(number)) for number, one in enumerate(made))
    return wrong, sum(one.report.cached_tokens > 0 for one in made)


def _damaged(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    outcomes = []
    for what, damage in flips.DAMAGES.items():
        outcome = Outcome(f"{what}, kept conversations")
        for _ in range(trials):
            copy = folder / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder / "sound", copy)
            files = [*copy.glob(f"{holdings.FOLDER}/**/*.s*")]  # safetensors and sqlite
            damage(chance.choice(sorted(one for one in files if one.stat().st_size)), chance)
            outcome.add(*_judged(copy))
        outcomes.append(outcome)
    return outcomes


def _judged(folder: Path) -> tuple[int, int, list[str]]:
    try:
        return 0, wrong_answers(folder)[0], []
    except CachedRAGError:  # says what is wrong
        return 0, 0, []
    except Exception as error:
        return 0, 0, [f"{error!r:.200}"]


def _work(folder: Path, chance: random.Random) -> None:
    while True:
        with _engine(folder / "kv") as engine:
            engine.register(world.TEXTS[:_NUM])
            for number in chance.sample(range(_NUM), 3):
                for turn in _turns(number):
                    engine.generate(turn, **_OPTIONS)
            engine.forget(chance.sample(world.TEXTS[:_NUM], 2))


def _killed(trials: int, folder: Path, chance: random.Random) -> Outcome:
    outcome = Outcome(KILLED)
    for number in range(_NUM):
        _answer(number)  # so that no child computes it
    for number in range(trials):
        if number % 25 == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        kills.killed(_work, folder, random.Random(chance.random()), chance.uniform(0.01, 0.6))
        if (folder / "kv").exists():
            lost, wrong, found = _judged(folder / "kv")
            outcome.add(lost, wrong, found + left_behind(folder / "kv"))
        else:
            outcome.add(0, 0, [])
    return outcome


def left_behind(folder: Path) -> list[str]:
    """What is still kept of texts once all were forgotten, and what is damaged."""
    with _engine(folder) as engine:
        engine.register(world.TEXTS[:_NUM])
        for text in world.TEXTS[:_NUM]:
            engine.forget([text])
        forgotten = [
            tuple(engine.tokenization.tokenize(Rendered(text)).ids) for text in world.TEXTS[:_NUM]
        ]
    kept = KeptPrompts(folder / holdings.FOLDER)
    try:
        found = [problem.reason for problem in kept.check()]
        harmless = ("litter", "is missing")
        found = [one for one in found if not any(word in one for word in harmless)]
        for prompt in kept.all():
            if any(_has(prompt.ids, ids[2:-2]) for ids in forgotten):
                found.append("a forgotten text is still kept")
    finally:
        kept.close()
    return found


def _has(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))
