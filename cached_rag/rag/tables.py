"""Tables as lines of "column: value": CSV and its kin, sheets, and OpenDocument with its texts.

Numbers are as sheets show them. Excel's are read by openpyxl (extra "docs"). Nothing is run.
"""

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from operator import add, eq, ge, gt, le, lt, ne
from pathlib import Path
from posixpath import normpath
from typing import Any

from lxml import etree

from cached_rag.errors import needs_extra
from cached_rag.rag.document import Metadata, Part
from cached_rag.rag.html import tree_parts
from cached_rag.rag.office import DEEPEST, Archive, is_raised, says

# What a format has beside digits: colours and conditions, a currency, room for a character, a
# character as it is, text in quotes.
_BESIDE = re.compile(r"\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].|\\(.)|\"([^\"]*)\"")
# The same, or places for digits.
_PIECE = re.compile(rf"{_BESIDE.pattern}|(\.?[#0?][#0?,.]*)")
# Formats that are no plain number: general and scientific ones, days, fractions, thousands.
_OTHER = re.compile(r"[a-z/\"\\]|,(?![#0?])", re.IGNORECASE)
# Places whose digits are not one each, so that they cannot be parted.
_UNEVEN = re.compile(r",|\..*[#?.]")
# Which numbers a section is for; and what sections are for that do not say it, by how many.
_RULE = re.compile(r"\[(<=|>=|<>|[<>=])(-?\d+(?:\.\d+)?)\]")
_COMPARISONS = {"<": lt, "<=": le, ">": gt, ">=": ge, "=": eq, "<>": ne}
_USUAL_RULES = ((), ("",), ("[>=0]", "[<0]"), ("[>0]", "[<0]", ""))
_MOST_DECIMALS = 15

# Enough to see what stands between values.
_SAMPLE = 1 << 13
_BETWEEN = ";\t|,"  # a comma may be in each value, too, and so comes last
_NOTHING = "\x1f"  # in no text, see `document.py`
# What the elements of OpenDocument are in HTML, and those that are not shown.
_TAGS = {
    **{"list": "ul", "list-item": "li", "p": "p", "table": "table", "line-break": "br"},
    **{"table-row": "tr", "table-cell": "td", "covered-table-cell": "td", "page": "div"},
}
_HIDDEN = ("tracked-changes", "annotation", "forms", "desc", "hidden-paragraph")
# What says whether text of a style is shown, and that it is not.
_SHOWING, _UNSHOWN = ("display", "visibility"), {"none", "false", "hidden"}
_BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")
# Most cells or rows with text that one element stands for; and most columns, as LibreOffice has.
_MOST_REPEATED, _MOST_COLUMNS = 50, 16_384


def table_parts(source: str, between: str | None = None) -> Iterator[Part]:
    """A table's text, see `row_parts`.

    Args:
        between: what stands between values; None to find out.

    Raises:
        csv.Error: it is no table.
    """
    source = source.replace("\0", "")  # which Python 3.10 refuses
    csv.field_size_limit(max(csv.field_size_limit(), len(source)))
    rows = _split(source, between or _between(source))
    if rows and len(rows[0]) == 1 and sum(len(row) > 1 for row in rows) < len(rows) / 2:
        rows = _split(source, _NOTHING)  # one column, with such marks in its texts
    return row_parts(rows, {})


def _split(source: str, between: str) -> list[list[str]]:
    lines = io.StringIO(source, newline="")
    # A quoted value may stand behind a blank.
    return [row for row in csv.reader(lines, delimiter=between, skipinitialspace=True) if row]


def sheet_parts(name: str, rows: Sequence[Sequence[str]]) -> Iterator[Part]:
    """A sheet's text behind its name; nothing of an empty one."""
    known = {"heading": name} if name else {}
    if any(value.strip() for row in rows for value in row):
        yield name, known
    yield from row_parts(rows, known)


def row_parts(rows: Sequence[Sequence[str]], known: Metadata) -> Iterator[Part]:
    """Each row with its number, and each value with its column's name, if it has one.

    Rows with a first value alone that stand before the names are text. No value is left out.
    """
    rows = [row for row in rows if any(map(str.strip, row))]
    first = next((at for at, row in enumerate(rows) if any(map(str.strip, row[1:]))), 0)
    names = [name.strip() for name in rows[first]] if rows else []
    yield from ((value, known) for row in rows[:first] for value in row)
    rows = rows[first + 1 :]
    used = {at for row in rows for at, value in enumerate(row) if value.strip()}
    unused = [name for at, name in enumerate(names) if name and at not in used]
    yield "\n".join(unused), known
    for number, row in enumerate(rows, 1):
        yield "\n".join([f"Row {number}:", *_named(names, row)]), known


def _between(source: str) -> str:
    """What stands between values: what parts most rows into as many values, if several.

    They count twice if the first row is parted as well: what is within values, such as a decimal
    comma, is seldom within names.
    """
    lines = source[:_SAMPLE].splitlines()
    if len(source) > _SAMPLE:  # the last one may be cut
        lines = lines[:-1] or lines

    def alike(mark: str) -> int:
        rows = csv.reader(lines, delimiter=mark, skipinitialspace=True)
        widths = [len(row) for row in rows if row]
        most = max(Counter(width for width in widths if width > 1).values(), default=0)
        return most if 1 in widths[:1] else 2 * most

    return max(_BETWEEN, key=alike)


def _named(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for at, value in enumerate(row):
        name = names[at] if at < len(names) else ""
        if value.strip():
            yield f"  {name}: {value.strip()}" if name else f"  {value.strip()}"


def read_xlsx(path: Path) -> Iterator[Part]:
    """The sheets that are shown, one by one; of formulas, what they gave when they were saved.

    Raises:
        MissingPackageError: openpyxl is not installed.
    """
    with needs_extra("docs", "reading .xlsx files", "openpyxl"):
        from openpyxl import load_workbook

    with Archive(path) as archive:
        yield archive.titled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are of what else a book has, such as charts
        book = load_workbook(path, read_only=True, data_only=True, keep_links=False)
        for sheet in book.worksheets:
            if sheet.sheet_state == "visible":
                sheet.reset_dimensions()  # else rows are as wide as the file says
                cells = ([_shown(cell) for cell in row] for row in sheet.iter_rows())
                yield from sheet_parts(sheet.title, [row for row in cells if any(row)])
        book.close()


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
    """A number by one of Excel's number formats; as it is where that is not understood.

    >>> formatted(0.125, "0.0%"), formatted(5551234, "###-####")
    ('12.5%', '555-1234')
    """
    section, is_for_negative = _section(number, code or "General")
    plain = _BESIDE.sub("", section)
    runs = [found[4] for found in _PIECE.finditer(section) if found[4]]
    if _OTHER.search(plain) or (len(runs) > 1 and _UNEVEN.search("".join(runs))):
        return f"{number:.15g}"
    value = Decimal(repr(abs(number))).scaleb(2 * plain.count("%"))
    digits, pieces = _digits(value, "".join(runs)), list[str]()
    for run in runs[:0:-1]:  # the last digits stand in the last places, all others in the first
        pieces.append(digits[-len(run) :])
        digits = digits[: -len(run)]
    pieces.append(digits)

    def said(found: re.Match[str]) -> str:
        return pieces.pop() if found[4] else "".join(text or "" for text in found.groups())

    sign = "-" if number < 0 and not is_for_negative else ""
    return f"{sign}{_PIECE.sub(said, section)}".strip()


def _section(number: float, code: str) -> tuple[str, bool]:
    """A format's section for a number, and whether it is for negative ones alone."""
    sections = [one for one in code.split(";") if "@" not in one][:3]
    if not any(map(_RULE.search, sections)):
        sections = list(map(add, _USUAL_RULES[len(sections)], sections))
    for section in sections:
        rule = _RULE.search(section)
        if rule is None:
            return section, False
        bound = float(rule[2])
        if _COMPARISONS[rule[1]](number, bound):
            return section, rule[1] in ("<", "<=") and bound <= 0
    return "General", False


def _digits(value: Decimal, places: str) -> str:
    """A number's digits, in as many places as a format has."""
    whole, _, decimals = places.partition(".")
    comma = "," if "," in whole else ""
    least = len(whole.replace(",", "").lstrip("#?"))
    count = min(len(decimals), _MOST_DECIMALS)
    width = max(least, 1) + (count + 1 if count else 0)  # as of "00042"
    with localcontext() as context:
        context.rounding = ROUND_HALF_UP
        said = f"{value:0{width}{comma}.{count}f}"
    always = len(said) - count + len(decimals.rstrip("#?"))  # behind it, zeros are left out
    said = (said[:always] + said[always:].rstrip("0")).removesuffix(".")
    return said if least else said.removeprefix("0")


def read_opendocument(path: Path) -> Iterator[Part]:
    """A document's text as a reader sees it, with each note where it is referred to."""
    with Archive(path) as archive:
        content = archive.xml("content.xml")
        styles = [content, archive.xml("styles.xml")]
        equations = list(_equations(content, archive))
        yield archive.titled("meta.xml", ".//{*}title")
    hidden = set(_hidden_styles(styles))
    body = content.find("{*}body")
    if body is None:
        return
    for table in body.iterfind("{*}spreadsheet/{*}table"):
        if says(table, "style-name") not in hidden:
            yield from sheet_parts(says(table, "name"), list(_rows(table)))
    if body.find("{*}spreadsheet") is None:
        _write(body, hidden, set(_raised_styles(styles)), _ListStyles(styles))
        for place, equation in equations:
            place.append(equation)
        yield from tree_parts(body)


def _equations(content: Any, archive: Archive) -> Iterator[tuple[Any, Any]]:
    """Where equations stand, and each of them, which is a member of its own, as in HTML."""
    for place in content.iter("{*}object"):
        found = archive.xml(normpath(f"{says(place, 'href')}/content.xml"))
        if etree.QName(found).localname == "math":  # and not a chart
            for element in found.iter("{*}*"):
                element.tag = etree.QName(element).localname
            yield place, found


def _hidden_styles(styles: list[Any]) -> Iterator[str]:
    every = (one for root in reversed(styles) for one in root.iterfind(".//{*}style"))
    known = {says(style, "name"): style for style in every}
    for name, style in known.items():
        said = set[str]()
        for _ in range(DEEPEST):
            if style is not None and not said:
                said = {says(one, how) for one in style for how in _SHOWING} - {""}
                style = known.get(says(style, "parent-style-name"))
        if said & _UNSHOWN:
            yield name


def _raised_styles(styles: list[Any]) -> Iterator[str]:
    for root in styles:
        for style in root.iterfind(".//{*}style"):
            if is_raised(style, "{*}text-properties", "text-position"):
                yield says(style, "name")


class _ListStyles:
    """The numbers of lists, by what the styles say and which lists go on."""

    def __init__(self, styles: list[Any]) -> None:
        self._levels = {
            (says(style, "name"), says(level, "level")): level
            for root in styles
            for style in root.iterfind(".//{*}list-style")
            for level in style.iterfind("{*}list-level-style-number")
        }
        self._counts: dict[str, int] = {}

    def number(self, one: Any) -> None:
        """Make a list, not yet renamed, HTML's."""
        around = [up for up in one.iterancestors() if up.get("depth")]
        depth = int(around[0].get("depth")) + 1 if around else 1
        style = says(one, "style-name") or (around[0].get("kind") if around else "")
        goes_on = says(one, "continue-numbering") == "true" or bool(says(one, "continue-list"))
        one.set("depth", str(depth))
        one.set("kind", style)
        level = self._levels.get((style, str(depth)))
        if level is None:
            return
        one.tag = "ol"
        first = int(says(level, "start-value") or 1)
        if goes_on and depth == 1:
            first = self._counts.get(style, first)
        one.set("start", str(first))
        one.set("type", says(level, "num-format"))
        if depth == 1:
            self._counts[style] = first + sum(1 for _ in one.iterfind("{*}list-item"))


def _write(body: Any, hidden: set[str], raised: set[str], numbers: _ListStyles) -> None:
    """Give the elements of a tree HTML's names."""
    for element in list(body.iter("{*}*")):
        name = etree.QName(element).localname
        is_hidden = says(element, "style-name") in hidden or says(element, "display") == "none"
        if name in _HIDDEN or is_hidden:
            element.set("hidden", "")
        if name == "hidden-paragraph" and says(element, "is-hidden") == "true":
            next(element.iterancestors(*_BLOCKS), element).set("hidden", "")
        is_sup = name == "span" and says(element, "style-name") in raised
        element.tag = "sup" if is_sup else _TAGS.get(name, "span")
        if name == "h":
            level = says(element, "outline-level")
            element.tag = f"h{level}" if level in ("1", "2", "3", "4", "5") else "h6"
        elif name == "list":
            numbers.number(element)
        elif name in ("s", "tab"):
            element.text = " "
        elif name == "note-citation":
            element.text = f" [{element.text or ''}] "
        elif name == "list-item" and (start := says(element, "start-value")):
            element.set("value", start)


def _rows(table: Any) -> Iterator[list[str]]:
    """The cells' texts as they are shown, of the rows that have any."""
    for space in table.iter("{*}s", "{*}tab", "{*}line-break"):
        space.text = " "
    for row in table.iter("{*}table-row"):
        cells: list[str] = []
        empty = 0  # those at a row's end, for all columns that there may be, are left out
        for cell in row.iterchildren("{*}table-cell", "{*}covered-table-cell"):
            said = "\n".join("".join(line.itertext()) for line in cell.iterfind("{*}p"))
            count = _repeated(cell, "columns")
            if said:
                cells += [""] * empty + [said] * min(count, _MOST_REPEATED)
                empty, count = 0, max(0, count - _MOST_REPEATED)
            empty = min(empty + count, _MOST_COLUMNS - len(cells))
        if any(cells) and says(row, "visibility") in ("", "visible"):
            for _ in range(min(_repeated(row, "rows"), _MOST_REPEATED)):
                yield cells


def _repeated(element: Any, of: str) -> int:
    said = says(element, f"number-{of}-repeated")
    return int(said) if said.isdecimal() else 1
