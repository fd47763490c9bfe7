"""Database rows that carry a checksum, so that a damaged text is never taken for the real one.

A signed row is a tuple (name, *values, checksum), where the name is the row's number and the
checksum covers the values. Knows SQLite; knows no table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from cached_rag.errors import StoreError
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store.base import Problem
from cached_rag.kv.store.database import Database

_log = logging.getLogger(__name__)
Row = tuple[object, ...]


def row_sum(*values: object) -> str:
    """The checksum of a row's values and their types: guards against damage, not malice."""
    parts = (v if isinstance(v, bytes) else f"{type(v).__name__} {v}" for v in values)
    return digest(*parts)


def is_sound(row: Row) -> bool:
    """Whether a signed row is as it was written."""
    return row_sum(*row[1:-1]) == row[-1]


def sound(database: Database, rows: Iterable[Row]) -> Iterator[Row]:
    """Those signed rows that are as they were written; the others are logged."""
    for row in rows:
        if is_sound(row):
            yield row
        else:
            _log.warning("%s", _damage(database, row))


def check(database: Database, tables: Mapping[str, str]) -> list[Problem]:
    """What is damaged: the file itself, or rows in it.

    Args:
        tables: for each table, by name, the query for all its rows in signed form.
    """
    name = database.path.name
    problems = [Problem(name, reason) for reason in database.problems()]
    try:
        for table, query in tables.items():
            damaged = [row for row in database.rows(query) if not is_sound(row)]
            problems += [Problem(f"{name} {table}", _damage(database, row)) for row in damaged]
    except StoreError as error:
        problems.append(Problem(name, str(error)))
    return problems


def _damage(database: Database, row: Row) -> str:
    return (
        f"row {row[0]} in {database.path} is damaged and left out; ingest the documents again to "
        "have it back (cached-rag store verify lists all such rows)"
    )


def add_column(database: Database, table: str, name: str, value: str, select: str) -> None:
    """Add a text column to a table that an earlier version made, and sign its rows anew.

    Rows that were damaged before stay so.

    Args:
        value: what all rows have in the new column; it becomes the last of the signed values.
        select: the query for all rows in signed form, without the column.
    """
    if has_column(database, table, name):
        return
    with database.transaction() as connection:
        if has_column(database, table, name):  # another process was faster
            return
        rows = filter(is_sound, connection.execute(select).fetchall())
        sums = [(row_sum(*row[1:-1], value), row[0]) for row in rows]
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} TEXT NOT NULL DEFAULT '{value}'")
        connection.executemany(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", sums)


def has_column(database: Database, table: str, name: str) -> bool:
    """Whether a table has a column."""
    return name in {row[1] for row in database.rows(f"PRAGMA table_info({table})")}


def add_sums(database: Database, table: str, select: str) -> None:
    """Sign the rows of a table that an earlier version made, which had no checksums.

    Args:
        select: the query for (rowid, *values) of all rows.
    """
    if has_column(database, table, "checksum"):
        return
    with database.transaction() as connection:
        if has_column(database, table, "checksum"):  # another process was faster
            return
        connection.execute(f"ALTER TABLE {table} ADD COLUMN checksum TEXT NOT NULL DEFAULT ''")
        sums = [(row_sum(*values), row) for row, *values in connection.execute(select)]
        connection.executemany(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", sums)
