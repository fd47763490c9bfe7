"""Tables of values in text, CSV and its kin, and sheets, as lines of "column: value"."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from cached_rag.rag.document import Part
from cached_rag.rag.limits import limited

# Enough to see what stands between values.
_SAMPLE = 1 << 13
_BETWEEN = ",;\t|"
_NOTHING = "\x1f"  # in no text, see `document.py`


def table_to_text(source: str, between: str | None = None) -> str:
    """A table's text, see `rows_to_text`.

    Args:
        between: what stands between values; None to find out.

    Raises:
        csv.Error: it is no table.
        DocumentError: this would be more text than a document may have.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(source)))
    rows = _split(source, between or _between(source))
    if rows and len(rows[0]) == 1 and sum(len(row) > 1 for row in rows) < len(rows) / 2:
        rows = _split(source, _NOTHING)  # one column, with such marks in its texts
    return rows_to_text(rows)


def _split(source: str, between: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(source, newline=""), delimiter=between) if row]


def sheet_parts(name: str, rows: Sequence[Sequence[str]]) -> list[Part]:
    """A sheet's text behind its name; nothing of an empty one."""
    text = rows_to_text(rows)
    return [(f"{name}\n\n{text}", {"heading": name} if name else {})] if text else []


def rows_to_text(rows: Sequence[Sequence[str]]) -> str:
    """Each row with its number, and each value with its column's name, if it has one.

    Rows with a first value alone that stand before the names are text. No value is left out.
    """
    rows = [row for row in rows if any(map(str.strip, row))]
    first = next((at for at, row in enumerate(rows) if any(map(str.strip, row[1:]))), 0)
    names = [name.strip() for name in rows[first]] if rows else []
    parts = [value.strip() for row in rows[:first] for value in row if value.strip()]
    rows = rows[first + 1 :]
    used = {at for row in rows for at, value in enumerate(row) if value.strip()}
    if unused := [name for at, name in enumerate(names) if name and at not in used]:
        parts.append("\n".join(unused))
    numbered = enumerate(rows, 1)
    texts = ("\n".join([f"Row {number}:", *_named(names, row)]) for number, row in numbered)
    return "\n\n".join([*parts, *limited(texts, len)])


def _between(source: str) -> str:
    try:
        return csv.Sniffer().sniff(source[:_SAMPLE], _BETWEEN).delimiter
    except csv.Error:  # rows that differ, or one column
        return max(_BETWEEN, key=source.lstrip().partition("\n")[0].count)


def _named(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for at, value in enumerate(row):
        name = names[at] if at < len(names) else ""
        if value.strip():
            yield f"  {name}: {value.strip()}" if name else f"  {value.strip()}"
