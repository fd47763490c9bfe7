"""Rows with a checksum of what they hold, so that a damaged text is never served for the text.

Knows SQLite; knows no table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store.database import Database

_log = logging.getLogger(__name__)
Row = tuple[object, ...]


def row_sum(*values: object) -> str:
    """Checksum of a row's values, their types included: guards against damage, not malice."""
    parts = (v if isinstance(v, bytes) else f"{type(v).__name__} {v}" for v in values)
    return digest(*parts)


def is_sound(row: Row) -> bool:
    """Whether a row of (name, *values, checksum) is what was written."""
    return row_sum(*row[1:-1]) == row[-1]


def sound(database: Database, rows: Iterable[Row]) -> Iterator[Row]:
    """Those of (name, *values, checksum) that are what was written; others are logged."""
    for row in rows:
        if is_sound(row):
            yield row
        else:
            _log.warning("%s", damage(database, row))


def damage(database: Database, row: Row) -> str:
    """What is wrong with a row, and what helps."""
    return (
        f"row {row[0]} in {database.path} is damaged and left out; ingest the documents again to "
        "have it back (cached-rag store verify lists all such rows)"
    )


def add_sums(database: Database, table: str, select: str) -> None:
    """Give a table that was made without checksums those of its rows as they are now.

    Args:
        select: query for (rowid, *values) of all rows.
    """

    def has_sums() -> bool:
        return "checksum" in {row[1] for row in database.rows(f"PRAGMA table_info({table})")}

    if has_sums():
        return
    with database.transaction() as connection:
        if has_sums():  # another process was faster
            return
        connection.execute(f"ALTER TABLE {table} ADD COLUMN checksum TEXT NOT NULL DEFAULT ''")
        sums = [(row_sum(*values), row) for row, *values in connection.execute(select)]
        connection.executemany(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", sums)
