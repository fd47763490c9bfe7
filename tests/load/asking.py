"""Starts locust, whose clients ask a server, and sums up what came of it. Knows processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from load.figures import Phase, Row, phase
from load.serving import Served

# Who waits for an answer asks nothing else meanwhile, so there are clients for so many seconds.
_PATIENCE = 35
_RESULTS = Path(tempfile.gettempdir()) / f"load-{os.getpid()}.jsonl"
_COMMAND = [
    *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("users.py"))),
    *("--headless", "--only-summary", "--loglevel", "ERROR", "--exit-code-on-error", "0"),
    *("--stop-timeout", "90"),
]


@dataclass(frozen=True)
class Load:
    """How many ask, and how.

    Attributes:
        rate: requests a second; 0 is as many as `users` get answered.
        seconds: for how long.
        users: how many clients there are; 0 for enough of them.
        is_hostile: whether some of them behave badly.
    """

    name: str
    rate: float
    seconds: int
    users: int = 0
    is_hostile: bool = False


def loaded(server: Served, load: Load) -> Phase:
    """Load a server, and say what came of it."""
    with server.watching() as watched:
        locust = _started(server, load)
        if locust.wait() != 0:
            raise SystemExit("locust failed; is it installed?")
    return phase(load.name, load.seconds, _rows(), watched)


def stopped(server: Served, load: Load) -> tuple[Phase, float]:
    """Tell a server to stop in the middle; also the seconds that it took."""
    with server.watching() as watched:
        locust = _started(server, load)
        time.sleep(load.seconds / 2)
        seconds = server.stop()
        locust.wait()
    # Who comes after it has stopped finds nobody.
    rows = [row for row in _rows() if row.get("status") != 0]
    return phase(load.name, load.seconds, rows, watched), seconds


def _started(server: Served, load: Load) -> subprocess.Popen[bytes]:
    users = load.users or max(16, int(load.rate * _PATIENCE))
    rate = load.rate / users if load.rate else 1000.0
    known = {"LOAD_RATE": str(rate), "LOAD_RESULTS": str(_RESULTS)}
    known["LOAD_HOSTILE"] = str(int(load.is_hostile))
    command = [*_COMMAND, "-u", str(users), "-r", str(users), "-t", f"{load.seconds}s"]
    command += ["--host", server.address]
    devnull = subprocess.DEVNULL
    return subprocess.Popen(command, env=os.environ | known, stdout=devnull, stderr=devnull)


def _rows() -> list[Row]:
    with _RESULTS.open() as file:
        rows = [json.loads(line) for line in file]
    _RESULTS.unlink()
    return rows
