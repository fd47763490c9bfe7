"""Tables of values in text, CSV and its kin, as lines of "column: value"."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from cached_rag.rag.limits import bounded

# Enough to see what stands between values.
_SAMPLE = 1 << 13
_BETWEEN = ",;\t|"


def table_to_text(source: str, between: str | None = None) -> str:
    """Each row with its number, and each value with its column's name, if it has one.

    Rows with a first value alone that stand before the names are text. No value is left out.

    Args:
        between: what stands between values; None to find out.

    Raises:
        csv.Error: it is no table.
        DocumentError: this would be more text than a document may have.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(source)))
    lines = io.StringIO(source, newline="")
    rows = [row for row in csv.reader(lines, delimiter=between or _between(source)) if any(row)]
    first = next((at for at, row in enumerate(rows) if any(map(str.strip, row[1:]))), 0)
    names = rows[first] if rows else []
    parts = [value.strip() for row in rows[:first] for value in row if value.strip()]
    numbered = enumerate(rows[first + 1 :], 1)
    texts = ("\n".join([f"Row {number}:", *_named(names, row)]) for number, row in numbered)
    parts += bounded(texts, len)
    return "\n\n".join(parts) if len(rows) > first + 1 else "\n".join([*parts, *names])


def _between(source: str) -> str:
    try:
        return csv.Sniffer().sniff(source[:_SAMPLE], _BETWEEN).delimiter
    except csv.Error:  # one column, for one
        return ","


def _named(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for at, value in enumerate(row):
        name = names[at].strip() if at < len(names) else ""
        if value.strip():
            yield f"  {name}: {value.strip()}" if name else f"  {value.strip()}"
