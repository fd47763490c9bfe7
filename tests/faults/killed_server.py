"""kill -9 of the server while clients ask, post texts and delete them; another goes on there."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from faults import kills, world
from faults.outcome import Outcome

from cached_rag.kv.database import Database
from cached_rag.server.app import create_app
from cached_rag.server.run import Server, bind
from cached_rag.server.service import Service

_NAME = "tiny"
_CHAT = {"model": _NAME, "temperature": 0, "max_tokens": 3, "method": "prefix"}


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try it so many times, each 25 of them in one folder."""
    outcome, asked = Outcome("kill -9 of the server while it is used"), _Asked(chance)
    world.right_kv()
    for number in range(trials):
        if number % 25 == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        found: list[str] = []
        with bind("127.0.0.1", 0) as bound:
            child = _started(folder, bound, pause_s=0.03 * (number % 2))
            clients = [threading.Thread(target=asked.some, args=(bound, found)) for _ in range(3)]
            for client in clients:
                client.start()
            time.sleep(chance.uniform(0.05, 0.6))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for client in clients:
            client.join(60)
            found += ["a client hangs"] * client.is_alive()
        lost, wrong, litter = kills.judged(folder)
        outcome.add(lost, wrong, found + litter)
    return [outcome]


def _started(folder: Path, bound: socket.socket, pause_s: float) -> int:
    """A child process that serves at this address until it is killed.

    Args:
        pause_s: the longest pause behind a transaction, so that kills come between two of them.
    """
    bound.listen()
    child = os.fork()
    if not child:
        try:
            _pause_behind_transactions(pause_s)
            engine = world.engine(folder / "kv", write_back=True, learn="recurring")
            server = Server(create_app(Service(engine, _NAME)), 5)
            asyncio.run(server.serve(sockets=[bound]))
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    return child


def _pause_behind_transactions(longest_s: float) -> None:
    begun = Database.transaction

    @contextmanager
    def paused(database: Database, *given: float) -> Iterator[sqlite3.Connection]:
        with begun(database, *given) as connection:
            yield connection
        time.sleep(random.uniform(0, longest_s))

    Database.transaction = paused


class _Asked:
    """What clients ask, and what the answers have to be."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        with world.engine(world.nowhere()) as clean:
            self._right = [clean.generate(self._messages(n), max_tokens=3) for n in range(6)]

    @staticmethod
    def _messages(number: int) -> list[dict[str, str]]:
        texts = "\n\n".join(world.TEXTS[number : number + 4])
        return [{"role": "user", "content": f"{texts}\n\n{world.QUESTION}"}]

    def some(self, bound: socket.socket, found: list[str]) -> None:
        """Ask until nobody answers."""
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                while True:
                    self._one(client, found)
        except (httpx.HTTPError, OSError):
            pass  # it was killed

    def _one(self, client: httpx.Client, found: list[str]) -> None:
        number, kind = self._chance.randrange(6), self._chance.choice(["ask", "post", "delete"])
        texts = {"texts": world.TEXTS[number : number + 3]}
        if kind == "ask":
            body = _CHAT | {"messages": self._messages(number)}
            got = client.post("/chat/completions", json=body)
        else:
            got = client.request("POST" if kind == "post" else "DELETE", "/documents", json=texts)
        if got.status_code != 200:
            found.append(f"{kind}: {got.status_code} {got.text[:200]}")
        elif kind == "ask":
            said = got.json()["choices"][0]["message"]["content"]
            if said != self._right[number].text:
                found.append(f"another answer: {said!r}")
