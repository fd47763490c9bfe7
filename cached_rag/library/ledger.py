"""The ledger of a vector store: which of its documents has which text.

It serves the integrations with frameworks. Several documents may have the same text, whose KV is
kept once. By the ledger the KV is deleted when the last of these documents is. Knows no vector
store and no KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from cached_rag.errors import ConfigError
from cached_rag.kv.database import IN_MEMORY, Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    id TEXT PRIMARY KEY, document TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_document ON nodes (document);
CREATE INDEX IF NOT EXISTS by_text ON nodes (text);
"""
# SQLite bounds the number of parameters, not the length of one.
_THESE = "id IN (SELECT value FROM json_each(?))"
# Halves of surrogate pairs, as careless readers of files leave them: no tokenizer and no file takes
# a text with one.
HALF_PAIR = re.compile(r"[\ud800-\udfff]")
Forget = Callable[[list[str]], object]


class Ledger:
    """The texts of chunks, by the chunks' ids. Safe for several threads and processes.

    White space around a text is not kept, as its KV is found without it; a text with half of a
    surrogate pair, which has no KV, is not kept at all. `forget` is called before the ledger's own
    entry is deleted, so a removal that fails half-way can be repeated. Copies are the ledger
    itself.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Open a file, or make it.

        Args:
            path: None keeps the ledger in memory only.

        Raises:
            StoreError: the file is damaged or cannot be opened. All methods may raise it, too.
        """
        self._database = Database(Path(path or IN_MEMORY), _SCHEMA)

    def __copy__(self) -> Ledger:
        """Itself, as it is there to be shared."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """Itself, as above."""
        return self

    def __reduce__(self) -> tuple[type[Ledger], tuple[Path]]:
        """For pickling: the path, by which whoever unpickles it opens the same file.

        Raises:
            ConfigError: it is in memory.
        """
        path = self._database.path
        if path == IN_MEMORY:
            raise ConfigError(
                "a ledger in memory cannot be pickled, as another process would find it empty; "
                "give the vector store ledger=, a file"
            )
        return type(self), (path,)

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def put(self, chunks: Iterable[tuple[str, str, str]], forget: Forget) -> None:
        """Add chunks, or replace those with the same ids; of several with one id, the last counts.

        Args:
            chunks: (id, id of the document that the chunk is a piece of, text) each.
            forget: called with the replaced texts that no chunk has any more, if there are any.
        """
        last = {str(name): (str(name), document, text.strip()) for name, document, text in chunks}
        rows = [row for row in last.values() if not HALF_PAIR.search(row[2])]
        self._replace(last, rows, forget)

    def remove(self, ids: Iterable[str], forget: Forget) -> None:
        """Delete chunks; unknown ids are ignored.

        Args:
            forget: called with the texts that no chunk has any more, if there are any.
        """
        self._replace(list(ids), [], forget)
        self._database.scrub()

    def _replace(
        self, ids: Collection[str], rows: Sequence[tuple[str, str, str]], forget: Forget
    ) -> None:
        kept = {text for *_, text in rows}
        if gone := [text for text in self._only(ids) if text not in kept]:
            forget(gone)
        with self._database.transaction() as connection:
            connection.execute(f"DELETE FROM nodes WHERE {_THESE}", (_listed(ids),))
            connection.executemany("INSERT INTO nodes VALUES (?, ?, ?)", rows)

    def ids(self, document: str | None = None) -> list[str]:
        """Ids of the chunks of a document; None for those of all documents."""
        if document is None:
            return self._database.read(str, "SELECT id FROM nodes")
        return self._database.read(str, "SELECT id FROM nodes WHERE document = ?", document)

    def alike(self, ids: Iterable[str]) -> list[str]:
        """Ids of all chunks that have the same text as one of these, with these among them."""
        texts = f"SELECT text FROM nodes WHERE {_THESE}"
        query = f"SELECT id FROM nodes WHERE text IN ({texts})"
        return self._database.read(str, query, _listed(ids))

    def texts(self, ids: Iterable[str]) -> dict[str, str]:
        """The texts of chunks, by id; unknown ids are left out."""
        rows = self._database.rows(f"SELECT id, text FROM nodes WHERE {_THESE}", _listed(ids))
        return {str(name): str(text) for name, text in rows}

    def _only(self, ids: Iterable[str]) -> list[str]:
        """Texts that no other chunks have than these."""
        these = _listed(ids)
        others = f"SELECT 1 FROM nodes o WHERE o.text = nodes.text AND NOT o.{_THESE}"
        query = f"SELECT DISTINCT text FROM nodes WHERE {_THESE} AND NOT EXISTS ({others})"
        return self._database.read(str, query, these, these)


def _listed(ids: Iterable[object]) -> str:
    """Ids as SQLite reads them; those that are numbers or UUIDs, as some stores have them, too."""
    return json.dumps([str(name) for name in ids])
