"""Finds the files of a folder that have a reader, names their documents, and tells which changed.

A folder may be written while it is looked through: what goes meanwhile is not there. A root is a
folder or a single file that was ingested, wherever it lies. A document's source is its root's name,
and its path in the root: "docs/guide/a.md"; a single file's source is its name. Opens no file.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cached_rag.errors import ConfigError, DocumentError
from cached_rag.kv.database import Database
from cached_rag.kv.files import status_of
from cached_rag.kv.fingerprint import digest
from cached_rag.library.ledger import HALF_PAIR
from cached_rag.rag.document import shown
from cached_rag.rag.readers import READERS, is_built_in

# These stand for a suffix: of links that lead to a folder, to nothing or out of the folder, and of
# what is no suffix by its length or letters, and where there are many.
_LINKS, _OTHERS = "links", "of other kinds"
_LONGEST_SUFFIX, _MOST_SUFFIXES = 16, 20
# What systems and office programs put beside documents, and what is no document of anybody.
_NO_DOCUMENTS = ("thumbs.db", "ehthumbs.db", "desktop.ini")
_NO_DOCUMENT_STARTS = (".", "~$", "~wrl")
# A file that changed so shortly before may change again without another time: clocks of file
# systems are coarse (FAT counts two seconds), and those of other machines differ.
_SETTLED_NS = 5 * 10**9
# What makes text of files; another version may make another one.
_MAKERS = (
    *("cached-rag", "chardet", "docutils", "kreuzberg", "lxml", "markdown-it-py", "openpyxl"),
    "pypdf",
)
# The table of an index that `Roots` keeps.
ROOTS = "CREATE TABLE IF NOT EXISTS roots (name TEXT PRIMARY KEY, path TEXT NOT NULL);"
# What gives what lies below the first of two sources its place below the second one.
_RENAMED = """SET source = ?2 || substr(source, length(?1) + 1)
    WHERE substr(source || '/', 1, length(?1) + 1) = ?1 || '/'"""
# Once documents are: chunks of those that could not be renamed stay.
_OF_RENAMED = "AND source NOT IN (SELECT source FROM documents)"


@dataclass(frozen=True)
class FoundFile:
    """What lies at a path, hidden files aside.

    Attributes:
        files: the files that have a reader, sorted.
        passed_over: (suffix, count) of the other files, most frequent first; the suffix is "" for
            files without one, "links" for those that lead to folders, to nothing or out of the
            folder, and "of other kinds" for the rest where there are very many.
        unreadable: folders and files that this user may not look at, or not now, with the reason.
            What is below them is not known.
    """

    files: tuple[Path, ...]
    passed_over: tuple[tuple[str, int], ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()


def look_at(path: Path | str) -> FoundFile:
    """A file itself, of whatever kind, or all files below a folder.

    A link below a folder counts if it leads to a file in the folder that is not found otherwise.

    Raises:
        DocumentError: nothing is there.
    """
    root = absolute(path)
    return _Look(root, root.resolve()).found() if is_folder(root) else FoundFile((root,))


def is_folder(path: Path) -> bool:
    """Whether a folder is there, or else a file.

    Raises:
        DocumentError: neither is.
    """
    try:
        is_file, is_one = path.is_file(), path.is_dir()
    except OSError as error:  # as for a name that is too long
        said = error.strerror or error
        raise DocumentError(f"{shown(path)} cannot be looked at ({said})") from error
    if not (is_file or is_one):
        raise _missing(path)
    return is_one


def is_hidden(path: Path) -> bool:
    """Whether the name of a file, or of a folder above it, is that of no document.

    It begins with a dot; or an office program or a system keeps it for itself.
    """
    names = [name.lower() for name in path.parts]
    return any(name.startswith(_NO_DOCUMENT_STARTS) or name in _NO_DOCUMENTS for name in names)


def _missing(root: Path) -> DocumentError:
    return DocumentError(f"there is no file or folder at {shown(root)}")


@dataclass
class _Look:
    """One look through a folder.

    Attributes:
        inside: where the folder is, if links lead to it.
        files: by where they lead.
    """

    root: Path
    inside: Path
    files: dict[Path, Path] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def found(self) -> FoundFile:
        waiting = [self.root]  # folders may be nested more deeply than calls may
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(str(folder)) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                self._note(error)
                continue
            for entry in entries:
                place = folder / entry.name
                try:
                    if is_hidden(Path(entry.name)):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(place)
                    else:
                        self._take(place)
                except OSError as error:  # in a folder whose names may be read, and nothing else
                    self._note(error)
        files = tuple(sorted(self.files.values()))
        return FoundFile(files, self._passed_over(), tuple(self.unreadable.items()))

    def _take(self, file: Path) -> None:
        is_link = file.is_symlink()
        if not file.is_file():
            self.others[_LINKS] += is_link
            return
        target, suffix = file.resolve(), file.suffix.lower()
        if not target.is_relative_to(self.inside):
            self.others[_LINKS] += 1
        elif suffix not in READERS or target.suffix.lower() != suffix:
            is_one = suffix.isprintable() and len(suffix) <= _LONGEST_SUFFIX
            self.others[suffix if is_one else _OTHERS] += 1
        elif not (is_link and target in self.files):
            self.files[target] = file

    def _passed_over(self) -> tuple[tuple[str, int], ...]:
        rest = Counter(dict(self.others.most_common()[_MOST_SUFFIXES:]))
        counts = self.others - rest
        counts[_OTHERS] += rest.total()
        return tuple((+counts).most_common())

    def _note(self, error: OSError) -> None:
        """Remember what cannot be read; what is gone is no error, unless it is the root."""
        place = self.root if error.filename is None else Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            self.unreadable[place] = f"{shown(place)} cannot be looked at ({error.strerror})"
        elif place == self.root:
            raise _missing(self.root) from error


def stamp(file: Path) -> str:
    """The same text as long as a file does not change; empty if that cannot be told."""
    try:
        found = file.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        if time.time_ns() - max(times) < _SETTLED_NS or not is_built_in(file):
            return ""
        place = str(file.resolve())
    except OSError:
        return ""
    return digest(_makers(), place, *map(str, (found.st_size, found.st_ino, *times)))


@cache
def _makers() -> str:
    return " ".join(map(_version, _MAKERS))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True)
class Root:
    """A root's name, and its absolute path when it was last ingested."""

    name: str
    path: Path

    def source(self, path: Path) -> str | None:
        """The source of an absolute path in this root; None if it lies elsewhere."""
        real, real_root = (Path(os.path.realpath(one)) for one in (path, self.path))
        for inner, outer in ((path, self.path), (real, real_root)):
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
    return HALF_PAIR.search(name) is None


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
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except RuntimeError as error:
        raise DocumentError(f"{path}: there is no such user; write the path in full") from error


class Roots:
    """The roots of one index."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Root]:
        """All roots that have documents."""
        rows = self._database.rows("SELECT name, path FROM roots")
        heads = {_head(source) for source in self.sources()}
        return [Root(str(name), Path(str(path))) for name, path in rows if name in heads]

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
        roots = self.all()
        holding = [root for root in roots if root.source(path) is not None]
        if name is None and holding:
            return max(holding, key=lambda root: len(root.path.parts))
        root = Root(_checked(path.name if name is None else name, path), path)
        former = next((one.path for one in roots if one.name == root.name), None)
        if former is None:
            self._check_is_free(root)
        elif name is None:
            self._check_is_same(root, former, files, is_unchanged)
        return root

    def _check_is_free(self, root: Root) -> None:
        """See that a new root's documents would not be among texts that are of no file.

        Raises:
            DocumentError: they would, and such texts would count as files that are gone.
        """
        if root.name in map(_head, self.sources()):
            raise DocumentError(
                f"the index has texts called {root.name} that are of no folder or file; ingest "
                f"{root.path} by another name (name=, --name), or delete them before"
            )

    def _check_is_same(
        self,
        root: Root,
        former: Path,
        files: Sequence[Path],
        is_unchanged: Callable[[str, Path], bool],
    ) -> None:
        """See that a known root of the same name has moved to where this root is.

        It has if nothing is at its old place, and some document is unchanged at the new one.

        Raises:
            DocumentError: it has not.
            StoreError: this user may not look at the old place.
        """
        sources = ((join(root.name, file.relative_to(root.path)), file) for file in files)
        if status_of(former) is not None or not any(is_unchanged(*one) for one in sources):
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
        others = {one.name: root.source(one.path) for one in self.all() if one.name != root.name}
        moved = {name: base for name, base in others.items() if base is not None}
        # In one transaction: documents that have a name of no root are taken for texts in no file.
        with self._database.transaction() as connection:
            row = (root.name, str(root.path))
            connection.execute("INSERT OR REPLACE INTO roots VALUES (?, ?)", row)
            connection.execute("PRAGMA defer_foreign_keys = ON")
            for table, only in (("documents", ""), ("chunks", _OF_RENAMED)):
                connection.executemany(f"UPDATE OR IGNORE {table} {_RENAMED} {only}", moved.items())
        return [source for source in self.sources() if _head(source) in moved]

    def free(self, sources: Collection[str]) -> None:
        """See that texts that are in no file may have these names, and that roots have none.

        A root is remembered when its last document is deleted, or gets another root's name. Texts
        would be taken for its files.

        Raises:
            DocumentError: one is empty or a path from the root, cannot be encoded, or belongs to
                a folder or file that was ingested.
        """
        with self._database.transaction() as connection:
            taken = ("", *(root.name for root in self.all()))
            for source in sources:
                if not is_text(source) or _head(source) in taken:
                    raise DocumentError(
                        f"a text cannot be called {source!r}: a name does not begin with a slash, "
                        "and what is before its first slash is no folder or file of the index"
                    )
            heads = {(_head(source),) for source in sources}
            connection.executemany("DELETE FROM roots WHERE name = ?", heads)

    def find(self, source: Path | str) -> str:
        """The source that is meant: itself, as `list` shows it, or that of a path on disk.

        Raises:
            DocumentError: there is no such document, or the path stands for several.
        """
        sources = self.sources()
        if str(source) in sources:
            return str(source)
        path = absolute(source)
        named = {root.source(path) for root in self.all()} if is_path(path) else set()
        meant = sorted(one for one in sources if one in named or shown(one) == str(source))
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise DocumentError(f"{source} is several documents; say which: {', '.join(meant)}")
        raise DocumentError(
            f"the index has no document {source}; name one that it has, as `cached-rag list` or "
            "`documents()` shows it"
        )

    def sources(self) -> list[str]:
        """The sources of all documents, sorted."""
        return self._database.read(str, "SELECT source FROM documents ORDER BY source")


def _head(source: str) -> str:
    return source.split("/", 1)[0]


def _checked(name: str, path: Path) -> str:
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise ConfigError(f"{name!r} cannot be the name of {path}; give it one without slashes")
    if not is_text(f"{path}{name}"):
        raise ConfigError(f"{str(path)!r} is no text in this system's encoding; rename it")
    return name
