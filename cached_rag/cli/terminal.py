"""What all commands share: the terminal, two options, and how reports are shown."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cached_rag.errors import ConfigError

# Into a pipe or a file tables go whole, as on a wide screen.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
out, err = Console(width=_WIDTH), Console(stderr=True)

Index = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[
    str | None, typer.Option(help="Alias, hub id, folder or .gguf file; kept in a new index.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps.")]
DEFAULT_INDEX = Path("cached-rag-index")


def require_index(index: Path) -> None:
    """Refuse a folder that is no index.

    Raises:
        ConfigError: it is none.
    """
    if not (index / "documents.sqlite").is_file():
        raise ConfigError(
            f"there is no index at {index}; make one with: cached-rag ingest PATH --index {index}"
        )


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of standard output, without any styling."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def print_reports(rows: list[tuple[str, Any]]) -> None:
    """Named reports as a table; of two, how much sooner the first one's first token came."""
    table = Table("", "method", "prompt", "cached", "recomputed", "TTFT ms", "total ms")
    for name, report in rows:
        table.add_row(
            name,
            report.method,
            str(report.prompt_tokens),
            str(report.cached_tokens),
            str(report.recomputed_tokens),
            f"{report.ttft_ms:.0f}",
            f"{report.total_ms:.0f}",
        )
    out.print(table)
    if len(rows) == 2:
        ratio = rows[1][1].ttft_ms / rows[0][1].ttft_ms
        out.print(f"first token {ratio:.1f}x sooner than full prefill")
