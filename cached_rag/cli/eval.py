"""`cached-rag eval`: quality and speed of methods on question-answering sets."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TextColumn
from rich.table import Table

from cached_rag.cli.terminal import Json, err, out, print_json
from cached_rag.errors import ConfigError

_METHODS = "full,prefix,reuse,cacheblend,epic,a3,infoflow,prophetkv,random,auto"


def evaluate_command(
    data: Annotated[list[Path], typer.Option(help="A .jsonl file; more may follow it.")],
    more: Annotated[list[Path] | None, typer.Argument(help="More .jsonl files.")] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; `method@encoding`, `mapreduce`, ... see docs.")
    ] = _METHODS,
    ratio: Annotated[str, typer.Option(help="Shares to recompute, comma-separated.")] = "0.15",
    model: Annotated[str, typer.Option(help="Alias, hub id, folder or .gguf.")] = "smollm2-135m",
    limit: Annotated[int | None, typer.Option(help="Most questions of a file.")] = None,
    answers: Annotated[bool, typer.Option(help="Generate answers, for F1, EM, ROUGE-L.")] = True,
    journal: Annotated[Path | None, typer.Option(help="Where to resume from.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods with full prefill: F1, likelihood of the answer, KL, time to first token."""
    from cached_rag import Engine
    from cached_rag.backends.resolve import cache_dir
    from cached_rag.evaluation import Journal, Settings, evaluate, make_trials, summarise
    from cached_rag.evaluation.plot import plot_frontier

    data = [*data, *(more or [])]
    trials = make_trials(_split(methods), [_ratio(part) for part in _split(ratio)])
    settings = Settings(tuple(data), tuple(trials), limit, answers)
    with Engine.load(model, dtype=dtype, device=device) as engine:
        run = settings.facts(engine)
        where = journal or cache_dir() / "eval" / f"{settings.digest(engine)}.jsonl"
        kept = Journal(where, run)
        columns = (*Progress.get_default_columns(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, console=err, disable=as_json) as bar:
            tasks = {path.stem: bar.add_task(path.stem, total=None) for path in data}

            def progress(name: str, done: int, total: int) -> None:
                bar.update(tasks[name], completed=done, total=total)

            evaluate(engine, settings, kept, progress)
    rows = summarise(settings.chosen(kept), [(trial.name, trial.ratio) for trial in trials])
    if csv_file is not None:
        _write_csv(rows, csv_file)
    if plot is not None:
        plot_frontier(rows, plot)
    if as_json:
        print_json({"rows": rows})
        return
    out.print(_table(rows))
    if any(row["small"] for row in rows):
        out.print("Sets of fewer than 30 questions show large differences only.", style="yellow")
    out.print(f"Measurements are kept in {where}", style="dim", markup=False)


def _split(text: str) -> list[str]:
    """Parts between commas; a comma between a method's options does not split."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part and ":" in parts[-1]:
            parts[-1] += "," + part
        elif part.strip():
            parts.append(part.strip())
    return parts


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"a ratio is a number from 0 to 1, not {text!r}") from None


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    names = ("data", "method", "ratio", "n", "F1", "EM", "NLL", "NLL - full's (95 %)", "KL")
    table = Table(*names, "agree", "charged", "TTFT ms", "speed-up")
    for row in rows:
        low, high = row["nll_diff_ci"] or (None, None)
        table.add_row(
            row["data"],
            row["method"],
            f"{row['ratio']:g}",
            str(row["n"]),
            _number(row["f1"]),
            _number(row["em"]),
            _number(row["nll"]),
            f"{_number(row['nll_diff'])} ({_number(low)}, {_number(high)})",
            _number(row["kl"]),
            _number(row["agreement"]),
            _number(row["charged_recompute"]),
            f"{row['ttft_ms']:.0f}",
            f"{row['speedup']:.1f}x",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
