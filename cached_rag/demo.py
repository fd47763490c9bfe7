"""The demo: real documents, a real model, three questions, cached against full prefill."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cached_rag.rag import CachedRAG

CORPUS = Path(__file__).parent / "demo_corpus" / "peps"
QUESTIONS = (
    "What does the built-in function breakpoint() do?",
    "Which syntax does PEP 604 propose for union types?",
    "What does PEP 3110 change about catching exceptions?",
)
_METHODS = ("full", "cacheblend", "reuse")
_ROUNDS = 3


def run_demo(index: Path, model: str | None, codec: str | None, console: Console) -> None:
    """Ingest, ask, compare; a second run finds everything ingested.

    Times are medians of a few rounds in which the methods take turns, after one to warm up.
    """
    with CachedRAG.open(index, model, codec=codec) as rag:
        summary = rag.ingest(CORPUS)
        console.print(
            f"{summary.added} documents added, {summary.unchanged} unchanged; "
            f"{summary.chunks} chunks, {summary.encoded} prefilled now in {summary.seconds:.0f} s\n"
        )
        table = Table("question", "prompt tokens", *(f"{m}, TTFT ms" for m in _METHODS), "speed-up")
        for number, question in enumerate(QUESTIONS, 1):
            console.print(f"[bold]{number}. {question}[/bold]")
            rag.ask(question, max_tokens=1)
            stream = rag.stream(question, max_tokens=64)
            for piece in stream:
                console.print(piece, end="", markup=False, highlight=False)
            console.print("\n", end="")
            for hit in stream.sources[:3]:
                console.print(f"   {hit}", style="dim", markup=False)
            console.print()
            medians = _medians(rag, question)
            tokens = str(stream.answer.report.prompt_tokens)
            times = [f"{medians[method]:.0f}" for method in _METHODS]
            ratios = [f"{medians['full'] / medians[method]:.1f}x" for method in _METHODS[1:]]
            table.add_row(str(number), tokens, *times, " / ".join(ratios))
        console.print(table)
        console.print(f"The index is in {index}; ask more: cached-rag ask QUESTION --index {index}")


def _medians(rag: CachedRAG, question: str) -> dict[str, float]:
    times: dict[str, list[float]] = {method: [] for method in _METHODS}
    for _ in range(_ROUNDS):
        for method, found in times.items():
            found.append(rag.ask(question, method=method, max_tokens=1).report.ttft_ms)
    return {method: statistics.median(found) for method, found in times.items()}
