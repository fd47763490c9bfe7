"""Tables as lines of "column: value": CSV and its kin, and sheets, their numbers as they are shown.

Excel's are read by openpyxl (extra "docs").
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, time, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path
from typing import Any

from cached_rag.errors import needs_extra
from cached_rag.rag.archive import Archive
from cached_rag.rag.document import Part, limited

# What a format has beside digits: colours and conditions, a currency, room for a character, a
# character as it is, text in quotes.
_BESIDE = re.compile(r"\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].|\\(.)|\"([^\"]*)\"")
_DIGITS = re.compile(r"[#0?][#0?,]*(?:\.([#0?]*))?(,*)")
# Formats that are no plain number: scientific ones, fractions, text.
_OTHER = re.compile(r"general|[eE][+-]|/|@", re.IGNORECASE)
_MOST_DECIMALS = 15
_EXACT = Context(prec=400)  # more digits than a number can have

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


def read_xlsx(path: Path) -> list[Part]:
    """The sheets that are shown, one by one; of formulas, what they gave when they were saved.

    Raises:
        MissingPackageError: openpyxl is not installed.
    """
    with needs_extra("docs", "reading .xlsx files", "openpyxl"):
        from openpyxl import load_workbook

    with Archive(path) as archive:
        parts = [archive.titled()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are of what else a book has, such as charts
        book = load_workbook(path, read_only=True, data_only=True, keep_links=False)
        for sheet in book.worksheets:
            if sheet.sheet_state == "visible":
                sheet.reset_dimensions()  # else rows are as wide as the file says
                cells = ([_shown(cell) for cell in row] for row in sheet.iter_rows())
                parts += sheet_parts(sheet.title, [row for row in cells if any(row)])
        book.close()
    return parts


def _shown(cell: Any) -> str:
    """A cell's value as the sheet shows it; days are written "2026-03-31"."""
    value = cell.value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime):
        is_day = "h" not in cell.number_format.lower() and value.time() == time()
        return value.date().isoformat() if is_day else value.isoformat(" ", "minutes")
    if isinstance(value, int | float):
        return formatted(value, cell.number_format)
    if isinstance(value, timedelta | time):
        return str(value)
    return "" if value is None else str(value)


def formatted(number: float, code: str) -> str:
    """A number by one of Excel's number formats; as it is if that is none for numbers.

    >>> formatted(0.125, "0.0%"), formatted(-1234.5, '#,##0.00" kg"')
    ('12.5%', '-1,234.50 kg')
    """
    sections = _sections(code)
    is_own = number < 0 and len(sections) > 1 and bool(sections[1])
    section = sections[1] if is_own else sections[0]
    plain = _BESIDE.sub("", section)
    if _OTHER.search(plain) or not (digits := _DIGITS.search(plain)):
        return f"{number:.15g}"
    decimals = digits[1] or ""
    value = abs(Decimal(repr(number))).scaleb(2 * plain.count("%") - 3 * len(digits[2]))
    least = Decimal(1).scaleb(-min(len(decimals), _MOST_DECIMALS))
    comma = "," if "," in digits[0].rstrip(",") else ""
    said = f"{value.quantize(least, ROUND_HALF_UP, _EXACT):{comma}f}"
    if not comma:  # as in "00042"
        said = "0" * (digits[0].partition(".")[0].count("0") - len(said.partition(".")[0])) + said
    optional = len(decimals) - len(decimals.rstrip("#?"))
    for _ in range(optional):
        said = said.removesuffix("0")
    said = said.removesuffix(".")
    spelled = _BESIDE.sub(lambda found: "".join(text or "" for text in found.groups()), section)
    place = _DIGITS.search(spelled)
    assert place is not None
    sign = "-" if number < 0 and not is_own else ""
    return f"{sign}{spelled[: place.start()]}{said}{spelled[place.end() :]}".strip()


def _sections(code: str) -> list[str]:
    """A format's parts: for numbers above zero, below, and zero. Quoted text may have ";"."""
    return re.findall(r"((?:\"[^\"]*\"|\\.|[^;])*)(?:;|$)", code) or [code]
