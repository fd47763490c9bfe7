"""How commands print tables, JSON and reports on the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

# A pipe or a file has no width: tables are written as on a wide screen, and nothing is cut off.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
# Tokens of a prompt that reuse need not make faster.
_SHORT = 1000
# Control characters, halves of surrogate pairs, and what changes the direction of writing.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text with what would command the terminal spelled out: names and answers are untrusted."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


class _Terminal(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does, but text is made `visible`."""
        super().print(*(visible(o) if isinstance(o, str) else o for o in objects), **options)


# Texts and names are printed as they are: ":key:" is no picture of a key.
out = _Terminal(width=_WIDTH, emoji=False)
err = _Terminal(stderr=True, emoji=False, soft_wrap=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: Mapping[str, Any]) -> None:
    """One object on one line of standard output, without any styling."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()  # into a pipe, too, whose reader may wait for it


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """A table of rows with their keys as its head; "none" without any row."""
    if not rows:
        out.print("none")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row.values()))
    out.print(table)


def print_machine(facts: Mapping[str, object]) -> None:
    """Print the machine that figures were measured on, as one dim line below them."""
    out.print(json.dumps(facts), style="dim", markup=False)


def plain(row: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, its floats rounded to four significant digits."""
    return {name: _rounded(value) for name, value in dataclasses.asdict(row).items()}


def _rounded(value: Any) -> Any:
    if not isinstance(value, float) or value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


def print_rows(rows: Sequence[Any], facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print dataclasses of one type and the machine of their figures, as a table or as JSON."""
    found = [plain(row) for row in rows]
    if as_json:
        print_json({"rows": found, "machine": facts})
        return
    print_table([{name.replace("_", " "): cell for name, cell in row.items()} for row in found])
    print_machine(facts)


def print_markdown(rows: Sequence[Any], facts: Mapping[str, object], *, as_json: bool) -> None:
    """As `print_rows`, the table in Markdown."""
    if as_json:
        print_rows(rows, facts, as_json=True)
        return
    for line in markdown([plain(row) for row in rows]):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    print_machine(facts)


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table, as the docs show it; columns named `..._bytes` are in MB."""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        sizes = {name: f"{row[name] / 1e6:.0f} MB" for name in titles if name.endswith("_bytes")}
        lines.append([str(cell) for cell in {**row, **sizes}.values()])
    return [f"| {' | '.join(line)} |" for line in lines]


def print_reports(rows: Sequence[tuple[str, Any]]) -> None:
    """Named reports as a table; of two, how much sooner or later the first one's first token came.

    Args:
        rows: a name and a `Report` each; where there are two, the second is full prefill's.
    """
    print_table(
        [
            {
                "": name,
                "method": report.method,
                "prompt": report.prompt_tokens,
                "cached": report.cached_tokens,
                "recomputed": report.recomputed_tokens,
                "TTFT ms": f"{report.ttft_ms:.0f}",
                "total ms": f"{report.total_ms:.0f}",
            }
            for name, report in rows
        ]
    )
    if len(rows) == 2:
        ratio = rows[1][1].ttft_ms / rows[0][1].ttft_ms
        out.print(f"first token {sooner(ratio)} than full prefill")
        if ratio < 1 and rows[0][1].prompt_tokens < _SHORT:
            out.print("of a prompt this short, question and repair are the larger part")


def sooner(ratio: float) -> str:
    """In words, what a time is against one that is `ratio` times as long."""
    return f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"
