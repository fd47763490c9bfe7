"""`python -m faults`: tries faults, and writes the table of docs/reliability.md."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from datetime import date
from pathlib import Path

from conftest import tiny_model
from faults import flips, kills, world
from faults.outcome import Outcome

from cached_rag.benchmarks import machine

_BEGIN, _END = "<!-- make test-faults -->\n", "<!-- end -->\n"


def main() -> None:
    """Run all campaigns; exits 1 if a trial was not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=250, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # which each trial gives, and should
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = flips.campaign(options.trials, Path(folder) / "flips", chance)
        outcomes += kills.campaign(options.trials, Path(folder) / "kills", chance)
    table = _table(outcomes)
    print(table)
    for outcome in outcomes:
        for fault in outcome.faults[:5]:
            print(f"{outcome.fault}: {fault}", file=sys.stderr)
    if options.write:
        _put(options.write, table)
    raise SystemExit(any(one.survived < one.trials for one in outcomes))


def _table(outcomes: list[Outcome]) -> str:
    facts = machine(tiny_model(world.MODEL))
    lines = ["| fault | trials | survived | lost | wrong |", "|---|---|---|---|---|"]
    lines += [f"| {o.fault} | {o.trials} | {o.survived} | {o.lost} | {o.wrong} |" for o in outcomes]
    made = f"(`make test-faults`, {date.today()}, commit {facts['commit']}, {facts['processor']})"
    return "\n".join([*lines, "", made, ""])


def _put(page: Path, table: str) -> None:
    text = page.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(before + _BEGIN + table + _END + after)


main()
