"""`python -m load`: what becomes of the server, and of who asks, under more than it can take.

First its capacity is found, with as many clients as it has rows, each of which asks again at once.
Then that many requests a second come, two and five times as many, whatever became of those
before; then among clients that behave badly; at last it is told to stop while they ask.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import httpx
from load.asking import Load, loaded, stopped
from load.figures import Phase
from load.serving import Served, served
from load.world import TEXTS
from tables import origin, table, write

_ROWS, _WAIT = 8, 20
_COMMAND = "make test-load"
_NAMES = [
    *("load", "asked /s", "answered /s", "refused", "failed", "first token, 50, 95, 99 %"),
    *("whole, 95 %", "longest queue", "memory", "files", "threads"),
]


def main() -> None:
    """Run all phases; exits 1 if anything failed that should not have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=int, default=90, help="of each phase")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    made = origin(_COMMAND)
    limits = ["--max-rows", str(_ROWS), "--max-wait-seconds", str(_WAIT)]
    limits += ["--sequence-bytes", str(256 << 20), "--client-seconds", "10"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.model, Path(folder), limits) as server,
    ):
        phases, seconds = _phases(server, options.seconds)
        log = (Path(folder) / "log").read_text()
    faults = [fault for one in phases for fault in one.failed]
    faults += ["a traceback in the log"] * log.count("Traceback")
    text = table(made, _NAMES, [_row(one) for one in phases])
    others = [dict(one.others) for one in phases if one.others]
    text += f"\nAfter SIGTERM it was over in {seconds:.0f} seconds. Hostile clients: {others}.\n"
    print(text)
    if options.write:
        write(options.write, _COMMAND, text)
    print(*faults[:20], sep="\n", file=sys.stderr)
    raise SystemExit(bool(faults))


def _phases(server: Served, each: int) -> tuple[list[Phase], float]:
    documents = {"texts": TEXTS}
    httpx.post(f"{server.address}/v1/documents", json=documents, timeout=600).raise_for_status()
    loaded(server, Load("warm", 0, 20, users=_ROWS))
    phases = [loaded(server, Load("capacity", 0, each // 2, users=_ROWS))]
    capacity = phases[0].answered
    phases += [loaded(server, Load(f"{n}x", n * capacity, each)) for n in (1, 2, 5)]
    phases.append(loaded(server, Load("2x, among hostile", 2 * capacity, each, is_hostile=True)))
    phases.append(loaded(server, Load("1x again", capacity, each)))
    last, seconds = stopped(server, Load("2x, SIGTERM", 2 * capacity, 40))
    return [*phases, last], seconds


def _row(one: Phase) -> list[str]:
    first = ", ".join(f"{ms / 1000:.1f}" for ms in one.first_ms)
    ends = (one.first, one.last)
    return [
        *(one.name, f"{one.offered:.2f}", f"{one.answered:.2f}", str(one.refused)),
        *(str(len(one.failed)), f"{first} s", f"{one.whole_ms[1] / 1000:.1f} s"),
        str(one.most_waiting),
        " to ".join(f"{each.rss / 2**20:.0f}" for each in ends) + " MB",
        " to ".join(str(each.files) for each in ends),
        " to ".join(str(each.threads) for each in ends),
    ]


main()
