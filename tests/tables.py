"""Tables that campaigns write into pages: between `<!-- make NAME -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from conftest import tiny_model

from cached_rag.evaluation.machine import machine


def origin(command: str) -> str:
    """What makes a table, when and where; to be asked for at the beginning, before commits."""
    facts = machine(tiny_model("llama"))
    return f"(`{command}`, {date.today()}, commit {facts['commit']}, {facts['processor']})"


def table(made: str, names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, with its `origin`."""
    lines = [names, ["---"] * len(names), *rows]
    drawn = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([*drawn, "", made, ""])


def write(page: Path, command: str, text: str) -> None:
    """Replace what a command wrote into a page."""
    before, begin, rest = page.read_text().partition(f"<!-- {command} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    if not (begin and end):
        raise SystemExit(f"{page} has no <!-- {command} --> with an end")
    page.write_text(before + begin + text + end + after)
