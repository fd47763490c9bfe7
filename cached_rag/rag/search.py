"""Finds chunks by their vectors and their words: FAISS and BM25 in memory, from an index's file.

Part numbers, error codes and names have no near meaning; a text has them or not. What another
process writes there is found by the next search. Filters say which chunks may be found.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sqlite3
import sys
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cached_rag.errors import ConfigError
from cached_rag.kv.database import Database
from cached_rag.library.ledger import HALF_PAIR
from cached_rag.rag.document import Metadata, searchable, shown

# What makes a value a pattern.
_WILD = re.compile(r"[*?\[]")
# Characters of a title: that of a text without one is its first paragraph.
_TITLE = 60
# Fields that every chunk has; all others are metadata.
FIELDS = ("source", "title", "ordinal")
# Most characters of a field's patterns, which take time quadratic in their length to be read.
_LONGEST = 4000
# What a chunk's checksum is of, and where that stands.
SIGNED = "c.id, d.title, c.ordinal, c.text, c.vector, c.metadata"
CHUNKS = "FROM chunks c JOIN documents d USING (source)"
# As many ids as there are in a list, in JSON.
_LISTED = "(SELECT value FROM json_each(?))"
# How many places of an order are joined with another's; farther down nothing much is added.
_FUSED = 100
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


@dataclass(frozen=True, repr=False)
class Hit:
    """A chunk that a search found. `str` and `repr` leave out its text, and the end of long titles.

    Attributes:
        text: the chunk's text.
        source: its document's name in the index.
        title: its document's title.
        ordinal: its number in the document, from 0.
        score: cosine similarity to the question, -1 to 1.
        metadata: what is known of it: "page" (of a PDF, from 1, where it begins), "heading"
            ("Install > Linux"; of several, joined by "; "), and what was said of it when it was
            added.
    """

    text: str
    source: str
    title: str
    ordinal: int
    score: float
    metadata: Metadata = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.score:.2f}  {self._place}  {self._title}"

    def __repr__(self) -> str:
        return f"<Hit {self.score:.2f} {self._place} {self._title!r}>"

    @property
    def _place(self) -> str:
        page = f" p. {self.metadata['page']}" if "page" in self.metadata else ""
        return f"{shown(self.source)} #{self.ordinal}{page}"

    @property
    def _title(self) -> str:
        is_long = len(self.title) > _TITLE
        return f"{self.title[:_TITLE].rstrip()} ..." if is_long else self.title


# What the values of some fields have to be, by the fields' names; or a function that judges a hit.
Where = Mapping[str, object] | Callable[[Hit], bool]


def judge(where: Mapping[str, object], known: Collection[str]) -> Callable[[Hit], bool]:
    """A filter as a function of a hit.

    Args:
        where: for each field the value it has to have: a string, in which `*`, `?` and `[...]`
            stand for other characters ("docs/guide/*"); a number; or a collection of such values,
            one of which has to fit (`range(3, 9)`). A chunk without the field does not fit.
        known: names of the metadata there are.

    Raises:
        ConfigError: a field that no chunk has, or a value of another kind.
    """
    if unknown := [name for name in where if name not in FIELDS and name not in known]:
        names = ", ".join([*FIELDS, *sorted(known)])
        raise ConfigError(f"no chunk has a field {unknown[0]!r} to filter by; there are: {names}")
    tests = {name: _matcher(name, wanted) for name, wanted in where.items()}
    return lambda hit: all(fits(_value(hit, name)) for name, fits in tests.items())


def described(metadata: Mapping[str, object]) -> Metadata:
    """What a user says of a document, checked.

    Raises:
        ConfigError: a name that stands for something else, or a value that is no string or number.
    """
    for name, value in metadata.items():
        is_plain = isinstance(value, str) or (
            isinstance(value, int | float) and abs(value) <= sys.float_info.max
        )
        is_cut = HALF_PAIR.search(f"{name}{value}") is not None
        if name in (*FIELDS, "text", "score") or not is_plain or is_cut:
            raise ConfigError(
                "metadata are whole characters and finite numbers, by names other than "
                f"{', '.join(FIELDS)}, text and score; got {name!r}: {value!r}"
            )
    return dict(metadata)  # type: ignore[arg-type]


def _value(hit: Hit, name: str) -> object:
    return getattr(hit, name) if name in FIELDS else hit.metadata.get(name)


def _matcher(name: str, wanted: object) -> Callable[[object], bool]:
    """Whether a field's value, None where there is none, is one of those that are wanted."""
    if isinstance(wanted, range):
        return lambda found: _is_within(found, wanted)
    values: Collection[object] = [wanted]
    if isinstance(wanted, Collection) and not isinstance(wanted, str | bytes | Mapping):
        values = wanted
    patterns = [one for one in values if isinstance(one, str) and _WILD.search(one)]
    is_plain = all(isinstance(value, str | int | float) for value in values)
    if not is_plain or sum(map(len, patterns)) > _LONGEST:
        raise ConfigError(
            "a filter's value is a string, a number, or a collection of these, with patterns of at "
            f"most {_LONGEST} characters; {name!r} has {reprlib.repr(wanted)}"
        )
    known = {*values, *map(str, values)}
    # Compiled here, once for all chunks; without any, it fits nothing.
    pattern = re.compile("|".join(map(translate, patterns)) or "(?!)")

    def fits(found: object) -> bool:
        if found is None:
            return False
        is_number = isinstance(found, int | float) and found in known
        return is_number or str(found) in known or pattern.match(str(found)) is not None

    return fits


def _is_within(found: object, wanted: range) -> bool:
    """Whether a range has a value, or what its text says."""
    # A range compares all its numbers with what is no int.
    if isinstance(found, float):
        return found.is_integer() and int(found) in wanted
    with suppress(ValueError):
        return (found if isinstance(found, int) else int(str(found))) in wanted
    return False


class Search:
    """The search among one index's chunks. Safe for several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._faiss: Any = None
        # What FAISS was built from: the file as other processes left it, and as this one did.
        self._built = (-1, -1)
        self._changes = 0
        # The words, with what they were taken from: the checksum of each chunk. None while they are
        # changed, so that they are read anew where that was interrupted.
        self._words: tuple[WordSearch, dict[int, str]] | None = None
        self._words_of = (-1, -1)
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Read the file anew for the next search: this process has changed what is searched.

        `Database.own_changes` would not do: it also counts documents marked as encoded, and reading
        all vectors takes long. Called within the change's transaction, so one at a time.
        """
        self._changes += 1

    def nearest(
        self,
        vector: NDArray[np.float32],
        k: int,
        where: Where | None = None,
        *,
        text: str = "",
        by: str = "vectors",
        least: float = -math.inf,
    ) -> list[Hit]:
        """The k best chunks, best first, each text once; scores are cosines, whatever the order.

        Args:
            vector: (dim,) float32 of unit length.
            where: which chunks may be among them, see `judge`; None for all.
            text: what the vector is of; its words are looked for.
            by: "vectors", "words", "hybrid" for both, or "auto", see `IndexConfig.search`.
            least: the lowest score that one may have.

        Raises:
            ConfigError: a filter by what no chunk has, a vector of another length; or SQLite cannot
                search for words.
        """
        if by == "auto":  # a part number or a year has no meaning that a vector could hold
            by = "hybrid" if any(map(str.isdigit, text)) else "vectors"
        with self._lock:
            index, words = self._refreshed(has_words=by != "vectors")
        if index is None:
            return []
        if len(vector) != index.d:
            raise ConfigError(
                f"this index has vectors of {index.d} numbers, and the question's has "
                f"{len(vector)}: it was made with another embedding, which has to be given again"
            )
        among = self._fitting(where) if isinstance(where, Mapping) else None
        total = index.ntotal if among is None else len(among)
        vector = vector.astype(np.float32)
        hits: dict[str, Hit] = {}
        reach, seen = 0, set[int]()
        while reach < total and len(hits) < k:
            reach = min(total, max(2 * reach, 2 * k, _FUSED if words else 0))
            near = _by_vector(index, vector, reach, among) if by != "words" else {}
            found = near
            if words is not None:
                with self._lock:
                    named = words.nearest(text, reach, among)
                order = fused(list(near), named)
                found = {one: near.get(one) or _cosine(index, one, vector) for one in order}
            # Those of one score stand in any order: a wider search may have others first.
            new = {chunk: score for chunk, score in found.items() if chunk not in seen}
            for hit in self._hits(list(new), list(new.values())):
                if hit.score >= least and (not callable(where) or where(hit)):
                    hits.setdefault(hit.text, hit)
            seen.update(new)
            if near and min(near.values()) < least:  # all others are further away
                break
        return list(hits.values())[:k]

    def _fields(self) -> set[str]:
        """The names of the metadata that chunks have."""
        readable = "CASE WHEN json_valid(metadata) THEN metadata ELSE '{}' END"
        query = f"SELECT DISTINCT key FROM chunks, json_each({readable})"
        return set(self._database.read(str, query))

    def _fitting(self, where: Mapping[str, object]) -> list[int]:
        """The ids of the chunks that a filter lets through."""
        known = self._fields() if set(where) - set(FIELDS) else set()
        fits = judge(where, known)
        query = f"SELECT c.id, c.source, d.title, c.ordinal, c.metadata {CHUNKS}"

        def chunk(row: int, source: str, title: str, ordinal: int, metadata: str) -> int:
            hit = Hit("", source, title, ordinal, 0.0, _known(metadata))
            return row if fits(hit) else -1

        return [row for row in self._database.read(chunk, query) if row >= 0]

    def _hits(self, ids: list[int], scores: list[float]) -> Iterator[Hit]:
        """The chunks that have these ids, but for those that are gone or damaged."""
        query = f"SELECT {SIGNED}, c.checksum, c.source {CHUNKS} WHERE c.id IN {_LISTED}"
        rows = self._database.rows(query, json.dumps(ids))
        sources = {row[0]: str(row[-1]) for row in rows}
        by_id = {row[0]: row for row in self._database.sound(row[:-1] for row in rows)}
        for chunk, score in zip(ids, scores, strict=True):
            if chunk in by_id:  # else deleted by another process since, or damaged
                _, title, ordinal, text, _, known, _ = by_id[chunk]
                place = int(str(ordinal))
                yield Hit(str(text), sources[chunk], str(title), place, score, _known(known))

    def _refreshed(self, *, has_words: bool) -> tuple[Any, WordSearch | None]:
        """FAISS over all vectors, None without any, and the words, as the file has them now."""
        now = (self._database.version(), self._changes)  # before the file is read
        if now != self._built:
            self._faiss, self._built = self._index(), now
        if not has_words:
            return self._faiss, None
        if self._words is None or now != self._words_of:
            self._words, self._words_of = self._read_words(), now
        return self._faiss, self._words[0]

    def _index(self) -> Any:
        """FAISS over all vectors; None without any."""
        import faiss

        # Vectors that are not as long as most others are damaged.
        rows = self._database.rows(
            "SELECT id, vector FROM chunks WHERE length(vector) = (SELECT length(vector)"
            " FROM chunks GROUP BY 1 ORDER BY count(*) DESC LIMIT 1) AND typeof(vector) = 'blob'"
            " AND length(vector) % 4 = 0"
        )
        if not rows:
            return None
        vectors = np.stack([np.frombuffer(data, np.float32) for _, data in rows])  # type: ignore[call-overload]
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        index.add_with_ids(vectors, np.array([row for row, _ in rows], np.int64))
        return index

    def _read_words(self) -> tuple[WordSearch, dict[int, str]]:
        """Bring in the words of chunks that came or went since the last time."""
        (words, read), self._words = self._words or (WordSearch(), {}), None
        kept = dict(self._database.read(_numbered, "SELECT id, checksum FROM chunks"))
        words.drop(one for one, sum_ in read.items() if kept.get(one) != sum_)
        new = [one for one, sum_ in kept.items() if read.get(one) != sum_]
        query = f"SELECT id, text FROM chunks WHERE id IN {_LISTED}"
        words.add(self._database.read(_numbered, query, json.dumps(new)))
        return words, kept


def _numbered(number: int, value: object) -> tuple[int, str]:
    return number, str(value)


def _by_vector(
    index: Any, vector: NDArray[np.float32], count: int, among: Sequence[int] | None
) -> dict[int, float]:
    """The chunks nearest to a vector with their cosines, best first."""
    import faiss

    only = None
    if among is not None:
        chosen = faiss.IDSelectorBatch(np.array(among, np.int64))
        only = faiss.SearchParameters(sel=chosen)  # type: ignore[call-arg]
    scores, ids = index.search(vector[None], count, params=only)
    return dict(zip(ids[0].tolist(), scores[0].tolist(), strict=True))


def _cosine(index: Any, chunk: int, vector: NDArray[np.float32]) -> float:
    """A chunk's similarity to a vector; of one that has no sound vector the least."""
    try:
        return float(index.reconstruct(chunk) @ vector)
    except RuntimeError:  # FAISS has no such chunk
        return -1.0


def _known(metadata: object) -> Metadata:
    """Metadata as it is kept, in JSON; empty if it was damaged."""
    try:
        known = json.loads(str(metadata))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


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
        only = "" if among is None else f"AND rowid IN {_LISTED}"
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


def worded(text: str) -> list[str]:
    """The words of a text as they are compared: "tx", "245"."""
    kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in _spelled(text))
    return "".join(kept).split()


def _terms(text: str) -> list[str]:
    """The words of a question, and pairs of those with no space between: "tx", "245", "tx 245"."""
    found: dict[str, None] = {}
    for piece in text.split():
        words = worded(piece)
        found |= dict.fromkeys((*words, *map(" ".join, pairwise(words))))
    return list(found)[:_MOST_TERMS]
