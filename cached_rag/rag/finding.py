"""Finds the files of a folder that have a reader, and tells which have changed. Opens none.

A folder may be written while it is looked through: what goes meanwhile is not there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cached_rag.errors import DocumentError
from cached_rag.kv.fingerprint import digest
from cached_rag.rag.document import shown
from cached_rag.rag.readers import READERS, is_built_in

# These stand for a suffix where links are counted that lead out of the folder, and those to folders
# of which not all files are found otherwise.
_ELSEWHERE, _FOLDERS = "links to elsewhere", "links to folders"
# So does this for those that are no suffixes by their length or letters, and where there are many.
_OTHERS = "of other kinds"
_LONGEST_SUFFIX, _MOST_SUFFIXES = 16, 20
# What systems and office programs put beside documents, and what is no document of anybody.
_NO_DOCUMENTS = ("thumbs.db", "ehthumbs.db", "desktop.ini")
_NO_DOCUMENT_STARTS = (".", "~$", "~wrl")
# A file that changed so shortly before may change again without another time: clocks of file
# systems are coarse (FAT counts two seconds), and those of other machines differ.
_SETTLED_NS = 5 * 10**9
# What makes text of files; another version may make another one.
_MAKERS = ("cached-rag", "pypdf", "kreuzberg", "markdown-it-py", "docutils", "lxml", "openpyxl")


@dataclass(frozen=True)
class FoundFile:
    """What lies at a path, hidden files aside.

    Attributes:
        files: the files that have a reader, sorted.
        passed_over: (suffix, count) of the other files, most frequent first; the suffix is "" for
            files without one, "links to elsewhere" for links that lead out of the folder,
            "links to folders" for those to folders, which are not followed, and "of other kinds"
            for the rest where there are very many.
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
    root = Path(path).expanduser()
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
    return any(map(_is_hidden, path.parts))


def _is_hidden(name: str) -> bool:
    folded = name.lower()
    return folded.startswith(_NO_DOCUMENT_STARTS) or folded in _NO_DOCUMENTS


def _missing(root: Path) -> DocumentError:
    return DocumentError(f"there is no file or folder at {shown(root)}")


@dataclass
class _Look:
    """One look through a folder.

    Attributes:
        inside: where the folder is, if links lead to it.
        files, links: by where they lead.
    """

    root: Path
    inside: Path
    files: dict[Path, Path] = field(default_factory=dict)
    links: dict[Path, Path] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def found(self) -> FoundFile:
        for file in self._walk():
            try:
                self._take(file)
            except OSError as error:  # in a folder whose names may be read, and nothing else
                self._note(error)
        files = tuple(sorted((self.links | self.files).values()))
        return FoundFile(files, self._passed_over(), tuple(self.unreadable.items()))

    def _passed_over(self) -> tuple[tuple[str, int], ...]:
        rest = Counter(dict(self.others.most_common()[_MOST_SUFFIXES:]))
        counts = self.others - rest
        counts[_OTHERS] += rest.total()
        return tuple((+counts).most_common())

    def _walk(self) -> Iterator[Path]:
        """All that is in the folder and no folder, hidden files aside.

        Keeps its own list of folders: they may be nested more deeply than calls may.
        """
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(str(folder)) as found:
                    entries = [entry for entry in found if not _is_hidden(entry.name)]
            except OSError as error:
                self._note(error)
                continue
            for entry in sorted(entries, key=lambda entry: entry.name):
                place = folder / entry.name
                if not _is_folder(entry):
                    yield place
                elif not entry.is_symlink():
                    waiting.append(place)
                else:
                    self.others[_FOLDERS] += self._is_passed_over(place)

    def _is_passed_over(self, folder: Path) -> bool:
        """Whether a link leads to a folder of which not all files are found otherwise."""
        target = folder.resolve()
        return not target.is_relative_to(self.inside) or is_hidden(target.relative_to(self.inside))

    def _take(self, file: Path) -> None:
        if not file.is_file():
            return
        target, suffix = file.resolve(), file.suffix.lower()
        if not target.is_relative_to(self.inside):
            self.others[_ELSEWHERE] += 1
        elif suffix not in READERS or target.suffix.lower() != suffix:
            is_one = suffix.isprintable() and len(suffix) <= _LONGEST_SUFFIX
            self.others[suffix if is_one else _OTHERS] += 1
        else:
            (self.links if file.is_symlink() else self.files)[target] = file

    def _note(self, error: OSError) -> None:
        """Remember what cannot be read; what is gone is no error, unless it is the root."""
        place = self.root if error.filename is None else Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            self.unreadable[place] = f"{shown(place)} cannot be looked at ({error.strerror})"
        elif place == self.root:
            raise _missing(self.root) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # what it is, nobody can say; whoever takes it for a file says why
        return False


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
