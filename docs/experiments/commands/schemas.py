"""Prompts made of modules: quality by layout, the Prompt Cache paper's applications, lengths."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from cached_rag.cli.options import Loading, Model, names, numbers
from cached_rag.cli.terminal import Json, err, out, plain, print_json, print_machine, print_table
from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from docs.experiments.commands import Loaded, Methods, NewTokens, Plot, Repeats

File = Annotated[Path, typer.Argument(help="A <schema>.")]


def schema_eval(
    file: File,
    model: Model = DEFAULT_MODEL,
    methods: Methods = "reuse,auto",
    prompts: Annotated[int, typer.Option(min=1, help="Random prompts.")] = 20,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """What each layout, encoding and method costs in quality, on random prompts of a schema."""
    from cached_rag import Engine
    from cached_rag.evaluation.timing import NEW_PROMPTS
    from cached_rag.pml import Schema
    from docs.experiments.schemas import evaluate_schema, schema_trials

    schema, trials = Schema.from_file(file), schema_trials(names(methods))
    with (
        Engine.load(model, store=NEW_PROMPTS, **how) as engine,
        Progress(console=err, disable=as_json) as bar,
    ):
        task = bar.add_task(schema.name, total=prompts)
        options: dict[str, Any] = {"prompts": prompts, "progress": lambda: bar.advance(task)}
        rows = evaluate_schema(engine, schema, trials, **options)
    if as_json:
        print_json({"rows": [dataclasses.asdict(row) for row in rows]})
    else:
        print_table(
            [
                {
                    **dataclasses.asdict(row.trial),
                    "KL": f"{row.kl.mean:.3f}",
                    "same first token": f"{row.agreement:.0%}",
                    "NLL - full": f"{row.nll.mean:+.3f} ({row.nll.low:+.3f}, {row.nll.high:+.3f})",
                    "speed-up": f"{row.speedup:.1f}x",
                    "charged": f"{row.charged:.3f}",
                }
                for row in rows
            ]
        )


def schema_demo(
    examples: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAMES", help="code, learner or trip; all by default."),
    ] = None,
    model: Model = DEFAULT_MODEL,
    max_tokens: NewTokens = 48,
    repeats: Repeats = 3,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """The three applications of the Prompt Cache paper, cached against full prefill."""

    from cached_rag import Engine
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS
    from docs.experiments.applications import EXAMPLES
    from docs.experiments.lengths import bench_prompt, footprint

    chosen = examples or list(EXAMPLES)
    if unknown := [name for name in chosen if name not in EXAMPLES]:
        raise ConfigError(f"no example {unknown[0]!r}; there are {', '.join(EXAMPLES)}")
    found: dict[str, Any] = {}
    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        for name in chosen:
            for prompt in EXAMPLES[name]().prompts:
                rows = bench_prompt(engine, prompt, max_tokens=max_tokens, repeats=repeats)
                shown = [plain(row) for row in rows]
                found.setdefault(name, []).append(shown)
                if not as_json:
                    out.print(name)
                    print_table(shown)
        weight = footprint(engine)
        facts = machine(engine.model)
    if as_json:
        print_json({"examples": found, "bytes": dataclasses.asdict(weight), "machine": facts})
        return
    out.print(
        f"KV: {weight.memory:.0f} bytes a token in memory; layers x heads x (key + value) x "
        f"bytes of the dtype = {weight.formula}"
    )


def schema_lengths(
    lengths: Annotated[
        str, typer.Option(help="Prompt tokens, comma-separated.")
    ] = "512,1024,2048,4096,8000",
    model: Model = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="What is timed against full prefill.")] = "reuse",
    repeats: Repeats = 3,
    plot: Plot = None,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Time to first token by prompt length: full prefill, KV in memory, KV on this disk."""
    from cached_rag.backends.transformers.loading import load_model
    from cached_rag.evaluation.machine import machine
    from docs.experiments.lengths import bench_lengths, plot_lengths

    wanted = numbers(lengths, int, "lengths are numbers")
    loaded = load_model(model, **how)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        Progress(console=err, disable=as_json) as bar,
    ):
        task = bar.add_task("rounds", total=repeats + 1)
        options: dict[str, Any] = {"method": method, "repeats": repeats}
        options["on_round"] = lambda: bar.advance(task)
        rows = bench_lengths(loaded, wanted, Path(folder), **options)
    if plot is not None:
        plot_lengths(rows, plot)
    if as_json:
        print_json({"rows": [plain(row) for row in rows], "machine": machine(loaded)})
        return
    print_table(
        [
            {
                "tokens": row.prompt_tokens,
                "full ms": f"{row.full_ms:.0f}",
                "memory ms": f"{row.memory_ms:.0f} ({row.full_ms / row.memory_ms:.1f}x)",
                "disk ms": f"{row.disk_ms:.0f} ({row.full_ms / row.disk_ms:.1f}x)",
            }
            for row in rows
        ]
    )
    print_machine(machine(loaded))
