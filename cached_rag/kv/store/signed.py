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
