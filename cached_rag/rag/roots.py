"""Names documents by their place in the folder that was ingested, wherever that folder lies.

A root is a folder or a single file that was ingested. A document's source is its root's name, and
its path in the root: "docs/guide/a.md". A single file's source is its name. Reads no document.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cached_rag.errors import ConfigError, DocumentError
from cached_rag.kv.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS roots (name TEXT PRIMARY KEY, path TEXT NOT NULL);"
_SHOWN = 5


@dataclass(frozen=True)
class Root:
    """A root's name, and its absolute path when it was last ingested."""

    name: str
    path: Path

    def source(self, path: Path) -> str | None:
        """The source of an absolute path in this root; None if it lies elsewhere."""
        for inner, outer in ((path, self.path), (path.resolve(), self.path.resolve())):
            if inner.is_relative_to(outer):
                return join(self.name, inner.relative_to(outer))
        return None


def join(source: str, relative: Path) -> str:
    """The source of a relative path below a source."""
    return "/".join((source, *relative.parts))


def is_below(source: str, base: str) -> bool:
    """Whether a source is `base` itself, or lies below it."""
    return source == base or source.startswith(base + "/")


def is_text(name: str) -> bool:
    """Whether a name can be written down; names of files need not be text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_path(path: Path) -> bool:
    """Whether a file system may have this path."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def absolute(path: Path | str) -> Path:
    """A path without `~`, `.` and `..`; links stay, for a link's own name is what counts.

    Raises:
        DocumentError: it is empty, as by an unset variable, and does not mean all that is here.
        ConfigError: it is no path, such as a list of some.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a path is a string or a Path, one at a time, not {path!r}")
    if path == "":
        raise DocumentError("the path is empty; name a file or folder, or . for this folder")
    return Path(os.path.abspath(Path(path).expanduser()))


class Roots:
    """The roots of one index."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Root]:
        """All roots that have documents."""
        rows = self._database.rows("SELECT name, path FROM roots")
        heads = {_head(source) for source in self._sources()}
        return [Root(str(name), Path(str(path))) for name, path in rows if name in heads]

    def _keep(self, root: Root, renamed: Iterable[tuple[str, str]]) -> None:
        """Remember where a root is now, and change sources, given as (source, new source).

        In one transaction: documents that have a name of no root are taken for texts in no file.
        """
        rows = [(new, old) for old, new in renamed]
        with self._database.transaction() as connection:
            row = (root.name, str(root.path))
            connection.execute("INSERT OR REPLACE INTO roots VALUES (?, ?)", row)
            connection.execute("PRAGMA defer_foreign_keys = ON")
            for table in ("documents", "chunks"):
                connection.executemany(f"UPDATE {table} SET source = ? WHERE source = ?", rows)

    def choose(
        self,
        path: Path,
        files: Sequence[Path],
        name: str | None,
        is_unchanged: Callable[[str, Path], bool],
    ) -> Root:
        """The root of an absolute path: a known one around it, else the path itself.

        Args:
            files: the documents at `path`.
            name: what to call the root. A known root of that name is then taken for this one.
            is_unchanged: told a source and a file, says whether the index has the file's content
                under that source.

        Raises:
            DocumentError: another folder or file has that name already.
            ConfigError: the name has slashes, or is empty.
        """
        holding = [root for root in self.all() if root.source(path) is not None]
        if name is None and holding:
            return max(holding, key=lambda root: len(root.path.parts))
        root = Root(_checked(name, path), path)
        if name is None:

            def moved_from(base: str) -> bool:
                return any(is_unchanged(join(base, f.relative_to(path)), f) for f in files)

            self._check_is_same(root, moved_from)
        return root

    def _check_is_same(self, root: Root, moved_from: Callable[[str], bool]) -> None:
        """See that a known root of the same name has moved to where this root is.

        It has if nothing is at its old place, and some document is unchanged at the new one.

        Raises:
            DocumentError: it has not.
        """
        if root.name in map(_head, self._sources()) and not self._has(root.name):
            raise DocumentError(
                f"the index has texts called {root.name} that are of no folder or file; ingest "
                f"{root.path} by another name (name=, --name), or delete them before"
            )
        former = next((other.path for other in self.all() if other.name == root.name), None)
        if former is not None and (former.exists() or not moved_from(root.name)):
            raise DocumentError(
                f"the index has documents called {root.name} from {former}, and {root.path} seems "
                "to be something else; ingest it by another name (name=, --name), or by that "
                "name if it is the same"
            )

    def absorb(self, root: Root) -> list[str]:
        """Remember a root, and rename documents that lie below it and have another root's name.

        Returns:
            Sources that were not renamed, because the index has their new name already. They are
            the same files, and are to be deleted.
        """
        sources = self._sources()
        taken = set(sources)
        others = [other for other in self.all() if other.name != root.name]
        bases = {other.name: root.source(other.path) for other in others}
        renamed, doubles = [], []
        for source in sources:
            name = _head(source)
            base = bases.get(name)
            if base is None:
                continue
            new = base + source[len(name) :]
            if new in taken:
                doubles.append(source)
            else:
                taken.add(new)
                renamed.append((source, new))
        self._keep(root, renamed)
        return doubles

    def _has(self, name: str) -> bool:
        return any(root.name == name for root in self.all())

    def check_free(self, source: str) -> None:
        """See that a text that is in no file may have this name.

        Raises:
            DocumentError: it is empty or a path from the root, cannot be encoded, or belongs to
                a folder or file that was ingested.
        """
        if not is_text(source) or not _head(source) or self._has(_head(source)):
            raise DocumentError(
                f"a text cannot be called {source!r}: a name does not begin with a slash, and what "
                "is before its first slash is no folder or file of the index"
            )

    def forget(self, sources: Iterable[str]) -> None:
        """Forget roots of which no document is left, and whose name texts in no file are to have.

        A root is remembered when its last document is deleted, or gets another root's name. Texts
        would be taken for its files.

        Args:
            sources: names of the texts, each of which `check_free` has seen.
        """
        below = "substr(source || '/', 1, length(?1) + 1) = ?1 || '/'"
        has_some = f"EXISTS (SELECT 1 FROM documents WHERE {below})"
        sql = f"DELETE FROM roots WHERE name = ?1 AND NOT {has_some}"
        with self._database.transaction() as connection:
            connection.executemany(sql, {(_head(source),) for source in sources})

    def find(self, source: Path | str) -> str:
        """The source that is meant: itself, or that of a path on disk.

        Raises:
            DocumentError: there is no such document, or the path stands for several.
        """
        sources = self._sources()
        if str(source) in sources:
            return str(source)
        path = absolute(source)
        named = {root.source(path) for root in self.all()}
        meant = sorted(source for source in sources if source in named)
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise DocumentError(f"{source} is several documents; say which: {', '.join(meant)}")
        near = _near(str(source), sources)
        raise DocumentError(
            f"the index has no document {source}; "
            + (f"near it are {', '.join(near)}" if near else "see what it has: cached-rag list")
        )

    def _sources(self) -> list[str]:
        return self._database.read(str, "SELECT source FROM documents ORDER BY source")


def _head(source: str) -> str:
    return source.split("/", 1)[0]


def _checked(name: str | None, path: Path) -> str:
    chosen = path.name if name is None else name
    if not chosen or "/" in chosen or "\\" in chosen or chosen in (".", ".."):
        raise ConfigError(f"{chosen!r} cannot be the name of {path}; give it one without slashes")
    if not is_text(f"{path}{chosen}"):
        raise ConfigError(f"{str(path)!r} is no text in this system's encoding; rename it")
    return chosen


def _near(source: str, sources: Sequence[str]) -> list[str]:
    """Sources that may have been meant: below that folder, of that name, or spelled alike."""
    alike = [s for s in sources if is_below(s, source.rstrip("/")) or s.endswith("/" + source)]
    found = alike or difflib.get_close_matches(source, sources, _SHOWN)
    return found[:_SHOWN]
