"""The command line of the experiments: a file a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.options import OptionsOf, numbers, to_write
from cached_rag.cli.terminal import plain, print_json, print_machine, print_table
from cached_rag.config import ModelConfig
from cached_rag.errors import ConfigError

Methods = Annotated[str, typer.Option(help="Methods to compare, comma-separated.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Rounds that are measured, after a round to warm up.")
]
Plot = Annotated[
    Path | None,
    typer.Option(callback=to_write, help="Draw the figures to this file (.png, .svg, ...)."),
]
_OF_LOAD_MODEL = ("dtype", "device", "weights")
# How a model is loaded that no engine is made of.
Loaded = Annotated[
    dict[str, Any],
    OptionsOf(
        (ModelConfig,),
        shown=_OF_LOAD_MODEL,
        only=_OF_LOAD_MODEL,
    ),
]


def counts(text: str, what: str) -> list[int]:
    """Whole numbers between commas, each 1 or more; see `numbers`."""
    found = numbers(text, int, f"{what} are whole numbers")
    if not found or min(found) < 1:
        raise ConfigError(f"{what} are whole numbers, 1 or more, not {text!r}")
    return found


def print_rows(rows: Sequence[Any], facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print dataclasses of one type and the machine of their figures, as a table or as JSON."""
    found = [plain(row) for row in rows]
    if as_json:
        print_json({"rows": found, "machine": facts})
        return
    print_table([{name.replace("_", " "): cell for name, cell in row.items()} for row in found])
    print_machine(facts)
