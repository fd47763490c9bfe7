"""`python -m soak`: many at once for minutes, and what a process keeps of 10,000 requests."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults import world
from gguf import GGMLQuantizationType as Kind
from soak.flat import Size, sizes
from soak.several import soak
from soak.tenancy import Waits, waits
from tables import origin, table, write
from tiny_gguf import write_gguf

_COMMAND = "make test-soak"


def main() -> None:
    """Run all of it; exits 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of the soak, each backend")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=30, help="of the tenants' questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    made = origin(_COMMAND)
    logging.disable(logging.WARNING)
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        began, folder = time.monotonic(), Path(name)
        crowd = (options.processes, options.threads, options.seconds, options.seed)
        faults = []
        for backend in ("transformers", "llama.cpp"):
            if backend == "llama.cpp":
                os.environ["FAULTS_GGUF"] = str(write_gguf(folder / "tiny.gguf", Kind.F32))
                world.model.cache_clear()
                world.right_kv.cache_clear()
            done = soak(folder / backend, *crowd)
            faults += [*done.faults, *["a wrong answer or module"] * done.wrong]
            what = f"{backend}: {options.processes} processes of {options.threads} threads"
            counts = ", ".join(f"{count} {thing}" for thing, count in sorted(done.counts.items()))
            result = f"{counts}; {done.wrong} wrong, {len(done.faults)} faults"
            rows.append((f"{what}, {options.seconds:g} s", result))
        del os.environ["FAULTS_GGUF"]
        world.model.cache_clear()
        asked = [options.requests // 5, options.requests]
        found = list(sizes(folder / "flat", asked))
        rows.append((f"{options.requests} requests, cancelled and refused ones", _grown(found)))
        rows.append(("another tenant's texts", _told(waits("smollm2-135m", options.pairs))))
    text = table(made, ("what", "what came of it"), rows)
    print(text, f"{time.monotonic() - began:.0f} s", sep="\n")
    for fault, count in Counter(faults).most_common(20):
        print(f"{count} x {fault}", file=sys.stderr)
    if options.write:
        write(options.write, _COMMAND, text)
    raise SystemExit(bool(faults))


def _grown(found: list[Size]) -> str:
    first, last = found
    mib = [f"{one.rss / 2**20:.0f}" for one in found]
    return (
        f"from request {first.requests} to {last.requests}: memory {mib[0]} to {mib[1]} MB, files "
        f"{first.files} to {last.files}, threads {first.threads} to {last.threads}, tensors "
        f"{first.tensors} to {last.tensors}"
    )


def _told(found: Waits) -> str:
    low, high = found.difference.low, found.difference.high
    return (
        f"first token {found.difference.mean:+.1f} ms [{low:+.1f}, {high:+.1f}] against texts that "
        f"nobody has cached (median {found.others:.0f} ms; who cached them: {found.own:.0f} ms)"
    )


if __name__ == "__main__":  # the soak's processes import this
    main()
