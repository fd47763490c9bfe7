"""Memory that lacks for a moment, in any matrix product of any of several requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from crowd import begun
from faults import world
from faults.outcome import Outcome

from cached_rag import Engine

_PROMPTS = [
    "\n\n".join(world.TEXTS[n : n + 4]) + f"\n\nQuestion {n}: {world.QUESTION}" for n in range(6)
]
_METHODS = ("auto", "full", "cacheblend:recompute_ratio=0.3", "prefix")
_ERRORS = (MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory"))


class Lack:
    """Fails one call of a linear layer; counts all of them.

    Attributes:
        at: the number of the call; 0 for none.
    """

    def __init__(self) -> None:
        self.count = self.at = 0
        self.error: Exception = MemoryError()
        self._forward = torch.nn.Linear.forward

    def __call__(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == self.at:
            raise self.error
        return self._forward(layer, hidden)


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Ask six questions at once so many times, one matrix product failing each time."""
    outcome, lack = Outcome("no memory left in one request of several"), Lack()
    with pytest.MonkeyPatch.context() as patch, world.engine(folder) as engine:
        engine.encode(world.TEXTS, context=None)
        patch.setattr(torch.nn.Linear, "forward", lambda *given: lack(*given))
        expected, calls = {}, {}
        for method in _METHODS:
            lack.count = 0
            expected[method], _ = _answers(engine, method)
            calls[method] = lack.count
        for _ in range(trials):
            method = chance.choice(_METHODS)
            lack.at, lack.error = chance.randint(1, calls[method]), chance.choice(_ERRORS)
            outcome.add(0, *tried(engine, lack, method, expected[method]))
    return [outcome]


def tried(
    engine: Engine, lack: Lack, method: str, expected: list[list[int]]
) -> tuple[int, list[str]]:
    lack.count = 0
    answers, errors = _answers(engine, method)
    lack.at = 0
    again, others = _answers(engine, method)
    wrong = sum(
        bool(ids) and ids != right
        for given in (answers, again)
        for ids, right in zip(given, expected, strict=True)
    )
    found = [f"{method}: {error!r:.200}" for error in others]
    found += [f"{method}: failed {len(errors)} of one"] * (len(errors) > 1)
    found += ["an error of another kind"] * any(error is not lack.error for error in errors)
    scheduler = engine.scheduler
    if scheduler.nbytes or scheduler.num_running or scheduler.num_waiting:
        found.append(f"{scheduler.nbytes} bytes of KV are held by nobody")
    return wrong + world.wrong_modules(engine), found


def _answers(engine: Engine, method: str) -> tuple[list[list[int]], list[Exception]]:
    """Tokens of every answer, none of one that failed; and the errors."""
    answers: list[list[int]] = []
    errors: list[Exception] = []
    for stream in begun(engine, _PROMPTS, method=method, max_tokens=4):
        try:
            answers.append(stream.result().token_ids)
        except Exception as error:
            answers.append([])
            errors.append(error)
    return answers, errors
