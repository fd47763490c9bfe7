"""`cached-rag eval`: quality and speed of methods on question-answering sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TextColumn

import cached_rag
from cached_rag.cli.options import Loading, Model, OptionsOf, at_home, names, numbers, to_write
from cached_rag.cli.terminal import Json, err, out, print_json, print_table
from cached_rag.config import DEFAULT_MODEL
from cached_rag.evaluation.data import Questions

_METHODS = "full,prefix,reuse,cacheblend,epic,a3,infoflow,prophetkv,random,auto"


@dataclass(frozen=True)
class Comparing:
    """Which methods are compared, and where the figures go.

    Attributes:
        methods: methods to compare, comma-separated; also `method@encoding` (docs/experiments.md).
        ratio: shares of cached tokens to recompute, comma-separated; each method that takes one is
            measured with each of them.
        journal: file that keeps every measurement, from which an interrupted run goes on; None for
            one in the cache directory, named by model and settings.
        plot: draw the figures to this file (.png, .svg, ...).

    Raises:
        ConfigError: the file cannot be written.
    """

    methods: str = _METHODS
    ratio: str = "0.15"
    journal: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name, found in (("journal", at_home), ("plot", to_write)):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, found(Path(given)))


def evaluate_command(
    data: Annotated[
        list[Path],
        typer.Option(
            help="Questions, a .jsonl file; more may follow it. Each line is an object: id, "
            "question, answers (a list of texts), chunks (each with title and text)."
        ),
    ],
    more: Annotated[list[Path] | None, typer.Argument(help="More .jsonl files.")] = None,
    model: Model = DEFAULT_MODEL,
    *,
    asked: Annotated[Comparing, OptionsOf(shown=("methods", "ratio"))],
    questions: Annotated[Questions, OptionsOf(shown=("limit", "chunks", "answers"))],
    how: Loading,
    as_json: Json = False,
) -> None:
    """Compare methods with full prefill: right answers, F1, likelihood, KL, time to first token.

    "right": the wanted text stands in the answer; "kept": how much of what full prefill gets right
    a method gets right, too. To measure your own questions, write each with its answer and the
    chunks that your retriever finds: docs/quality.md.
    """
    from cached_rag.backends.resolve import cache_dir
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.run import Journal, Settings, evaluate, make_trials, origins
    from cached_rag.evaluation.summary import plot_frontier, summarise

    data += more or []
    ratios = numbers(asked.ratio, float, "a ratio is a number from 0 to 1")
    trials = make_trials(names(asked.methods), ratios)
    settings = Settings(tuple(data), tuple(trials), questions)
    with cached_rag.Engine.load(model, **how) as engine:
        where = asked.journal or cache_dir() / "eval" / f"{settings.digest(engine)}.jsonl"
        facts = machine(engine.model)
        kept = Journal(where, settings.facts(engine), facts)
        columns = (*Progress.get_default_columns(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, console=err, disable=as_json) as bar:
            tasks = {path.stem: bar.add_task(path.stem, total=None) for path in data}

            def progress(name: str, done: int, total: int) -> None:
                bar.update(tasks[name], completed=done, total=total)

            evaluate(engine, settings, kept, progress)
    wanted = [(trial.name, trial.ratio) for trial in trials]
    chosen = [row for row in settings.chosen(kept) if (row["method"], row["ratio"]) in wanted]
    rows, measured = summarise(chosen, wanted), origins(chosen)
    if asked.plot is not None:
        plot_frontier(rows, asked.plot)
    if as_json:
        print_json({"rows": rows, "machine": facts, "measured": measured})
        return
    print_table([_cells(row) for row in rows])
    if any(row["small"] for row in rows):
        out.print("Sets of fewer than 30 questions show large differences only.", style="yellow")
    if len(measured) > 1:
        places = (f"{one['rows']} at {one['commit']}, {one['processor']}" for one in measured)
        out.print(f"Measured at several places: {'; '.join(places)}", style="yellow")
    out.print(f"Measurements are kept in {where}", style="dim")


def _cells(row: dict[str, Any]) -> dict[str, str]:
    low, high = row["nll_diff_ci"] or (None, None)
    return {
        "data": row["data"],
        "method": row["method"],
        "ratio": f"{row['ratio']:g}",
        "n": row["n"],
        "right": _number(row["right"]),
        "kept": _number(row["right_kept"]) and f"{row['right_kept']:.3f} of {row['right_of']}",
        "F1": _number(row["f1"]),
        "EM": _number(row["em"]),
        "NLL": _number(row["nll"]),
        "NLL - full's (95 %)": f"{_number(row['nll_diff'])} ({_number(low)}, {_number(high)})",
        "KL": _number(row["kl"]),
        "agree": _number(row["agreement"]),
        "charged": _number(row["charged_recompute"]),
        "TTFT ms": f"{row['ttft_ms']:.0f}",
        "speed-up": f"{row['speedup']:.1f}x",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
