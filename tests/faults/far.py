"""A remote store that is killed while it is used, or gives back other bytes than it was given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from faults import world
from faults.forged import KEY, forge
from faults.outcome import Outcome
from hostile import REDIS, hostile
from servers import Server, redis_server

from cached_rag import CachedRAGError, Engine, StoreConfig
from cached_rag.backends.machine import Profile
from cached_rag.kv import transports

Damage = Callable[[list[bytes], random.Random], bytes]
# A machine on which computing takes so long that all that is there is brought.
_SLOW = Profile(1.0, 0.0)


def _flip(values: list[bytes], chance: random.Random) -> bytes:
    data = bytearray(values[0])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _cut(values: list[bytes], chance: random.Random) -> bytes:
    return values[0][: chance.randrange(len(values[0]))]


def _exchange(values: list[bytes], chance: random.Random) -> bytes:
    return chance.choice(values[1:])


def _noise(values: list[bytes], chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(1, 2 * len(values[0])))


DAMAGES: dict[str, Damage] = {
    "a bit flipped": _flip,
    "a value cut short": _cut,
    "a value in place of another": _exchange,
    "noise": _noise,
}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of `DAMAGES`, and kills, so many times, with a real Redis."""
    folder.mkdir(parents=True, exist_ok=True)
    server = redis_server(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cached_rag.engine.resources.profile_of", lambda _: _SLOW)
            patch.setattr(transports, "_FIRST_S", 0.05)
            outcomes = [
                _damaged(what, one, trials, server, chance) for what, one in DAMAGES.items()
            ]
            return [*outcomes, _unsigned(trials, server, chance), _killed(trials, server, chance)]
    finally:
        server.kill()


@contextmanager
def _machine(server: Server | _Port, **options: object) -> Iterator[Engine]:
    """An engine with memory of its own and this store behind it."""
    settings = {"sequence_bytes": 0, "write_back": False} | options
    remote = f"redis://127.0.0.1:{server.port}/0"
    store = StoreConfig(remote=remote, **settings)  # type: ignore[arg-type]
    with Engine(world.model(), store) as engine:
        yield engine


def _encoded(server: Server, **options: object) -> redis.Redis:
    client = redis.Redis(port=server.port)
    client.flushall()
    with _machine(server, **options) as engine:
        engine.encode(world.TEXTS, context=None)
    return client


def _damaged(
    what: str, damage: Damage, trials: int, server: Server, chance: random.Random
) -> Outcome:
    outcome = Outcome(f"{what}, in a remote store")
    client = _encoded(server)
    sound = {key: client.get(key) for key in client.scan_iter("*")}
    for _ in range(trials):
        client.mset(sound)
        for key in chance.sample(sorted(sound), chance.randint(1, len(sound))):
            others = [value for other, value in sound.items() if other != key]
            client.set(key, damage([sound[key], *others], chance))
        outcome.add(0, *_asked(server))
    return outcome


def _unsigned(trials: int, server: Server, chance: random.Random) -> Outcome:
    """Another's KV, whole in itself, of the right name and of wrong numbers, is not signed."""
    outcome = Outcome("KV that others wrote into a remote store, with a key")
    foreign = forged(server)
    for _ in range(trials):
        client = redis.Redis(port=server.port)
        client.flushall()
        client.mset({key: foreign[key] for key in chance.sample(sorted(foreign), 8)})
        outcome.add(0, *_asked(server, signing_key=KEY))
    return outcome


def forged(server: Server) -> dict[bytes, bytes]:
    """Values of a remote store whose keys and values no model computes."""
    client = redis.Redis(port=server.port)
    client.flushall()
    with _machine(server) as engine:
        engine.encode(world.TEXTS, context=None)
        forge(engine, len(world.TEXTS))
    return {key: client.get(key) for key in client.scan_iter("*")}


def _asked(server: Server | _Port, **options: object) -> tuple[int, list[str]]:
    """Wrong modules, and other faults, of a machine that has to bring everything."""
    try:
        with _machine(server, **options) as engine:
            engine.register(world.TEXTS)
            engine.generate(world.PROMPT, method="reuse", max_tokens=2)
            wrong = world.wrong_in_prompt(engine)
            engine.encode(world.TEXTS[:6], context=None)
            return wrong + world.wrong_in_prompt(engine), []
    except Exception as error:
        return 0, [f"{error!r:.300}"]


def _killed(trials: int, server: Server, chance: random.Random) -> Outcome:
    """Two machines use it, one to encode and one to ask, while it is killed and comes back."""
    outcome = Outcome("kill -9 of a remote store that is used")
    for number in range(trials):
        if number % 25 == 0:
            redis.Redis(port=server.port).flushall()
        works = (partial(_encode, server, chance), partial(_ask, server, chance))
        with ThreadPoolExecutor(2) as threads:
            doing = [threads.submit(work) for work in works]
            time.sleep(chance.uniform(0.0, 0.15))
            server.kill()
            time.sleep(chance.uniform(0.0, 0.1))
            server.start()
            errors = [one.exception(60) for one in doing]
        found = [f"{error!r:.300}" for error in errors if error is not None]
        wrong = 0 if found else sum(one.result() for one in doing)
        after, others = _asked(server)
        outcome.add(0, wrong + after, found + others)
    return outcome


def hostile_campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Have a store reply to every question as no store would, so many times."""
    outcome = Outcome("hostile replies of a remote store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cached_rag.engine.resources.profile_of", lambda _: _SLOW)
        patch.setattr(transports, "_FIRST_S", 0.05)
        for _ in range(trials):
            with hostile(REDIS[chance.choice(sorted(REDIS))]) as port:
                outcome.add(0, *_asked(_Port(port), remote_timeout=0.5, finish_seconds=0.0))
    return [outcome]


class _Port(NamedTuple):
    port: int


def _encode(server: Server, chance: random.Random) -> int:
    with _machine(server) as engine:
        engine.encode(chance.sample(world.TEXTS, 6), context=None)
        return world.wrong_in_prompt(engine)


def _ask(server: Server, chance: random.Random) -> int:
    wrong = 0
    with _machine(server) as engine:
        engine.register(world.TEXTS)
        for _ in range(3):
            engine.generate(world.PROMPT, method="reuse", max_tokens=1)
            wrong += world.wrong_in_prompt(engine)
            with suppress(CachedRAGError):  # what could not be deleted there is tried again later
                engine.forget(chance.sample(world.TEXTS, 1))
    return wrong
