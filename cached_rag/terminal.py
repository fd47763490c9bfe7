"""What all commands share: the terminal, and two options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cached_rag.errors import ConfigError

out, err = Console(), Console(stderr=True)

Index = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
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
