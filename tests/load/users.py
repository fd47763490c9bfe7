"""Clients for locust: some ask, and some behave badly. `python -m load` starts them.

What came of each request goes to the file that LOAD_RESULTS names, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

from load.world import QUESTIONS, TEXTS
from locust import HttpUser, constant_throughput, events, task

CHANCE = random.Random(0)
RATE = float(os.environ["LOAD_RATE"])  # of one user, requests a second
HOSTILE = os.environ.get("LOAD_HOSTILE") == "1"
TOKENS = 24
_found: list[dict[str, object]] = []


def body(**more: object) -> dict[str, object]:
    """A question over five chunks."""
    chunks = "\n\n".join(CHANCE.sample(TEXTS, 5))
    content = f"{chunks}\n\n{CHANCE.choice(QUESTIONS)}"
    messages = [{"role": "user", "content": content}]
    return {"model": "load", "messages": messages, "max_tokens": TOKENS, "stream": True} | more


@events.quitting.add_listener
def write(**_: object) -> None:
    """Hand over what was found."""
    with Path(os.environ["LOAD_RESULTS"]).open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in _found)


class Asker(HttpUser):
    """Asks, whether or not it was refused the last time."""

    weight = 9

    def on_start(self) -> None:
        """Begin some time or other; else all of them would ask at the same moments."""
        time.sleep(CHANCE.random() / RATE)
        self.due = time.monotonic()

    def wait_time(self) -> float:
        """Until an interval after the last question was due, however long its answer took."""
        self.due += 1 / RATE
        return max(0.0, self.due - time.monotonic())

    @task
    def ask(self) -> None:
        began = time.perf_counter()
        row: dict[str, object] = {"kind": "asked", "at": time.time()}
        # A connection that stayed open may be closed at the moment in which it is used again.
        options = {"stream": True, "catch_response": True, "timeout": 300}
        options["headers"] = {"Connection": "close"}
        with self.client.post("/v1/chat/completions", json=body(), **options) as response:
            row["status"] = response.status_code
            if response.status_code == 200:
                row |= read(response, began)
            else:
                row["again"] = (response.headers or {}).get("Retry-After")
            response.success()  # locust's own counts are not used
        row["seconds"] = time.perf_counter() - began
        _found.append(row)


def read(response: object, began: float) -> dict[str, object]:
    """Read a streamed answer: seconds to the first token, and whether it is whole."""
    first, lines = None, []
    try:
        for line in response.iter_lines():  # type: ignore[attr-defined]
            if line and b'"content"' in line and first is None:
                first = time.perf_counter() - began
            lines = [*lines[-3:], line] if line else lines
    except Exception as error:
        return {"first": first, "is_whole": False, "error": repr(error)[:200]}
    is_whole = bool(lines) and lines[-1] == b"data: [DONE]"
    return {"first": first, "is_whole": is_whole, "error": "" if is_whole else str(lines)[:300]}


class Hostile(HttpUser):
    """Leaves early, reads slowly, sends nonsense or too much."""

    wait_time = constant_throughput(RATE)
    weight = 3 if HOSTILE else 0

    def _connected(self) -> socket.socket:
        host, port = self.host.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def _posted(self, content: bytes, declared: int | None = None) -> socket.socket:
        found = self._connected()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {declared or len(content)}\r\n\r\n"
        found.sendall(head.encode() + content)
        return found

    @task
    def leaves(self) -> None:
        with self._posted(json.dumps(body()).encode()) as connection:
            if CHANCE.random() < 0.5:
                connection.recv(1)
        _found.append({"kind": "left"})

    @task
    def reads_slowly(self) -> None:
        with self._posted(json.dumps(body(max_tokens=200)).encode()) as connection:
            for _ in range(20):
                if not connection.recv(8):
                    break
                time.sleep(0.5)
        _found.append({"kind": "read slowly"})

    @task
    def sends_half(self) -> None:
        with self._posted(b'{"model": "load", ', declared=100_000):
            time.sleep(CHANCE.random() * 5)
        _found.append({"kind": "sent half"})

    @task
    def sends_nonsense(self) -> None:
        self._expect("nonsense", CHANCE.choice(NONSENSE)())

    @task
    def sends_too_much(self) -> None:
        self._expect("too much", b'{"model": "' + b"a" * (17 << 20) + b'"}')

    def _expect(self, kind: str, content: bytes) -> None:
        """Send something that has to be refused."""
        status = 0
        try:
            with self._posted(content) as connection:
                line = connection.recv(64).split(b" ", 2)
                status = int(line[1]) if len(line) > 1 else 0
        except OSError:  # dropped while it was being sent
            pass
        _found.append({"kind": kind, "status": status})


NONSENSE = [
    lambda: CHANCE.randbytes(CHANCE.randrange(1, 2000)),
    lambda: b"[" * 100_000,
    lambda: b'{"model": "load", "messages": [' + b"1," * 50_000 + b"1]}",
    lambda: json.dumps(body(temperature="hot")).encode(),
    lambda: json.dumps(body(unheard_of=1)).encode(),
    lambda: json.dumps(body(messages=[{"role": "user", "content": "word " * 300_000}])).encode(),
    lambda: json.dumps(body(model="another")).encode(),
]
