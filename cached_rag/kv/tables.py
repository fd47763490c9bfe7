"""The catalog's tables, which of their rows have checksums, and how numbers are packed in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SCHEMA = """
CREATE TABLE IF NOT EXISTS modules (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, namespace TEXT NOT NULL,
    text_digest TEXT NOT NULL, anchor TEXT NOT NULL, length INTEGER NOT NULL,
    token_ids BLOB NOT NULL, token_starts BLOB NOT NULL, checksum TEXT NOT NULL,
    UNIQUE (model, namespace, text_digest)
);
CREATE TABLE IF NOT EXISTS encodings (
    model TEXT NOT NULL, namespace TEXT NOT NULL, digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    context TEXT NOT NULL, checksum TEXT NOT NULL,
    PRIMARY KEY (model, namespace, digest, context)
);
CREATE TABLE IF NOT EXISTS makers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    dtype TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS removals (count INTEGER NOT NULL);
INSERT INTO removals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM removals);
CREATE TABLE IF NOT EXISTS others (
    model TEXT NOT NULL, namespace TEXT NOT NULL, digest TEXT NOT NULL, token_ids BLOB NOT NULL,
    context TEXT NOT NULL, PRIMARY KEY (model, namespace, digest, context)
);
CREATE TABLE IF NOT EXISTS learned (
    model TEXT NOT NULL, namespace TEXT NOT NULL, text_digest TEXT NOT NULL,
    PRIMARY KEY (model, namespace, text_digest)
);
CREATE TABLE IF NOT EXISTS doomed (
    model TEXT NOT NULL, namespace TEXT NOT NULL, text_digest TEXT NOT NULL,
    token_ids BLOB NOT NULL, PRIMARY KEY (model, namespace, text_digest)
);
CREATE TABLE IF NOT EXISTS doomed_far (
    model TEXT NOT NULL, namespace TEXT NOT NULL, text_digest TEXT NOT NULL,
    token_ids BLOB NOT NULL, PRIMARY KEY (model, namespace, text_digest)
);
CREATE TABLE IF NOT EXISTS remotes (label TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS revivals (count INTEGER NOT NULL);
INSERT INTO revivals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM revivals);
"""
SIGNED = {
    "modules": "id, text_digest, anchor, length, token_ids, token_starts",
    "encodings": "rowid, token_ids, context",
}
# Texts whose KV has to go, from this machine and from a remote store.
DOOMED = ("doomed", "doomed_far")
# Of a model that is forgotten, what texts were encoded behind is kept while KV of it has to go.
_NEEDED = ("makers", "modules", *DOOMED)
DROP_NEEDLESS = "DELETE FROM encodings WHERE " + " AND ".join(
    f"NOT EXISTS (SELECT 1 FROM {table} t WHERE t.model = encodings.model)" for table in _NEEDED
)


def pack(numbers: Sequence[int]) -> bytes:
    """Numbers as a blob of 32-bit integers."""
    return array("i", numbers).tobytes()


def unpack(data: object) -> tuple[int, ...]:
    """What `pack` has packed."""
    numbers = array("i")
    numbers.frombytes(bytes(data))  # type: ignore[call-overload]
    return tuple(numbers)
