"""Finds the chunks that have a question's words, by BM25: SQLite's FTS5 in memory.

Part numbers, error codes and names have no near meaning; a text has them or not.
"""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cached_rag.errors import ConfigError
from cached_rag.rag.document import searchable

# Accents do not matter, in Latin script; marks that other scripts write vowels with do.
_TABLE = """CREATE VIRTUAL TABLE words USING fts5(
    text, tokenize="unicode61 remove_diacritics 2 categories 'L* N* M* Co'")"""
# Characters of scripts that put no spaces between words: Thai to Lao, Burmese, Khmer, kana, Han.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff])"
)
# Most different words and pairs of a question that are looked for.
_MOST_TERMS = 500
# How little the first places of an order count before the others; as Cormack et al. (2009).
_RANK_OFFSET = 60


class WordSearch:
    """BM25 over texts that have numbers. Not for several threads at the same time."""

    def __init__(self) -> None:
        """Begin without texts.

        Raises:
            ConfigError: this Python's SQLite cannot do it.
        """
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._connection.execute(_TABLE)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"searching for words needs SQLite's FTS5, which this Python lacks ({error}); open "
                'the index with search="vectors", or use another build of Python'
            ) from error

    def add(self, texts: Iterable[tuple[int, str]]) -> None:
        """Have texts found under their numbers, which must be new."""
        rows = ((number, _spelled(text)) for number, text in texts)
        self._connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)

    def drop(self, numbers: Iterable[int]) -> None:
        """Have texts found no more."""
        rows = [(number,) for number in numbers]
        self._connection.executemany("DELETE FROM words WHERE rowid = ?", rows)

    def nearest(self, text: str, count: int, among: Sequence[int] | None = None) -> list[int]:
        """The numbers of at most `count` texts that have words of this one, best first.

        Args:
            among: the numbers that may be found; None for all.
        """
        if not (terms := _terms(text)):
            return []
        asked = " OR ".join(f'"{term}"' for term in terms)
        only = "" if among is None else "AND rowid IN (SELECT value FROM json_each(?))"
        query = f"SELECT rowid FROM words WHERE words MATCH ? {only} ORDER BY rank, rowid LIMIT ?"
        given = () if among is None else (json.dumps(among),)
        return [row for (row,) in self._connection.execute(query, (asked, *given, count))]


def fused(*orders: Sequence[int]) -> list[int]:
    """Several orders as one, by reciprocal rank fusion: what stands high in any stands high."""
    sums: dict[int, float] = {}
    for order in orders:
        for rank, one in enumerate(order, start=1):
            sums[one] = sums.get(one, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(sums, key=lambda one: -sums[one])


def _spelled(text: str) -> str:
    """A text in one case, with spaces around what its script puts none around."""
    return _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", searchable(text)).casefold())


def _terms(text: str) -> list[str]:
    """The words of a question, and pairs of those with no space between: "tx", "245", "tx 245"."""
    found: dict[str, None] = {}
    for piece in text.split():
        kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in _spelled(piece))
        words = "".join(kept).split()
        found |= dict.fromkeys((*words, *map(" ".join, pairwise(words))))
    return list(found)[:_MOST_TERMS]
