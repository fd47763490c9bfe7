"""`python -m faults`: tries faults, and writes the table of docs/reliability.md."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

from faults.campaigns import CAMPAIGNS
from tables import origin, table, write

_COMMAND, _TRIALS = "make test-faults", 250
_NAMES = ("campaign", "faults", "trials", "survived", "lost", "wrong")


def main() -> None:
    """Run all campaigns; exits 1 if a trial was not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=_TRIALS, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    is_whole = options.only == list(CAMPAIGNS)
    command = _COMMAND if is_whole else f'{_COMMAND} ONLY="{" ".join(options.only)}"'
    made = origin(command if options.trials == _TRIALS else f"{command} TRIALS={options.trials}")
    logging.disable(logging.ERROR)  # which each trial gives, and should
    chance = random.Random(options.seed)
    outcomes, rows = [], []
    for name in options.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = CAMPAIGNS[name](options.trials, Path(folder), chance)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        counts = zip(*((o.trials, o.survived, o.lost, o.wrong) for o in found), strict=True)
        rows.append((name, "; ".join(one.fault for one in found), *map(sum, counts)))
        outcomes += found
    text = table(made, _NAMES, rows)
    print(text)
    for outcome in outcomes:
        for fault in outcome.faults[:5]:
            print(f"{outcome.fault}: {fault}", file=sys.stderr)
    if options.write:
        write(options.write, command, text)
    raise SystemExit(any(one.survived < one.trials for one in outcomes))


main()
