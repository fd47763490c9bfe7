"""What a GPU gives: `make test-gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cached_rag.cli.terminal import Json
from cached_rag.errors import ConfigError
from docs.experiments.commands import print_rows


def gpu(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="equality, first-tokens, answers, relay, batches: one is run here; several, or "
            "all, each in a process."
        ),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="Shape of the random model: tiny, 0.5b, 7b (some 30 GB).")
    ] = "7b",
    device: Annotated[str | None, typer.Option(help="None for the GPU.")] = None,
    folder: Annotated[Path, typer.Option(help="Where several parts' output is kept.")] = Path(
        "gpu-figures"
    ),
    seconds: Annotated[float, typer.Option(help="For several parts; then they are ended.")] = 570,
    as_json: Json = False,
) -> None:
    """Results held to the CPU's, and times of a model with random weights: on any machine."""
    from cached_rag.backends.machine import best_device, check_device
    from cached_rag.evaluation.machine import machine
    from docs.experiments.gpu import EQUALITY, PARTS, SMALL, Sizes, run_apart
    from docs.experiments.random_model import SHAPES, random_model

    chosen = parts or [EQUALITY, *PARTS]
    if unknown := set(chosen) - {EQUALITY, *PARTS}:
        raise ConfigError(f"there is no part {sorted(unknown)}; parts are {[EQUALITY, *PARTS]}")
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is not one of {', '.join(SHAPES)}")
    where = device or best_device()
    if device is None and where == "cpu":
        raise ConfigError("this machine has no GPU; to try it on the CPU, give --device cpu")
    if where.startswith("mps"):
        raise ConfigError(
            "times on mps would not wait for the device; take a CUDA device or the CPU"
        )
    check_device(where)
    if len(chosen) > 1 or chosen == [EQUALITY]:
        if as_json:
            raise ConfigError("--json is for one part, such as first-tokens")
        raise typer.Exit(run_apart(chosen, shape, where, folder, seconds))
    model = random_model(shape, where)
    for rows in PARTS[chosen[0]](model, SMALL if shape == "tiny" else Sizes()):
        print_rows(rows, machine(model), as_json=as_json)
