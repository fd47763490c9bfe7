"""`cached-rag doctor`: what this machine and a model can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cached_rag.cli.options import IndexModel, Loading, at_home, opened
from cached_rag.cli.terminal import Json, print_json, print_table
from cached_rag.config import DEFAULT_MODEL


def doctor_command(
    model: IndexModel = None,
    index: Annotated[
        Path | None, typer.Option("--index", callback=at_home, help="Also look at this index.")
    ] = None,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """What this machine and model can do, and whether reuse computes what the model would."""
    from cached_rag import Engine
    from cached_rag.evaluation.machine import examine, self_test

    if index is not None:
        with opened(index, model=model, **how) as rag:
            facts, tests = examine(rag.engine), self_test(rag.engine)
    else:
        with Engine.load(model or DEFAULT_MODEL, **how) as engine:
            facts, tests = examine(engine), self_test(engine)
    if as_json:
        print_json(facts | {"self_test": [vars(test) | {"passed": test.passed} for test in tests]})
    else:
        verdicts = {
            f"self-test: {test.name}": f"{'passed' if test.passed else 'FAILED'}, "
            f"error {test.error:.1e}"
            for test in tests
        }
        shown = facts | verdicts
        print_table([{"what": name, "found": value} for name, value in shown.items()])
    if not all(test.passed for test in tests):
        raise typer.Exit(1)
