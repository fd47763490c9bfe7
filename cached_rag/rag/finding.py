"""Finds the files of a folder that have a reader. Opens none of them.

A folder may be written while it is looked through: what goes meanwhile is not there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cached_rag.errors import DocumentError
from cached_rag.rag.readers import READERS

# These stand for a suffix where links are counted that lead out of the folder, and those to folders
# of which not all files are found otherwise.
_ELSEWHERE, _FOLDERS = "links to elsewhere", "links to folders"


@dataclass(frozen=True)
class Found:
    """What lies at a path, hidden files aside.

    Attributes:
        files: the files that have a reader, sorted.
        passed_over: (suffix, count) of the other files, most frequent first; the suffix is "" for
            files without one, "links to elsewhere" for links that lead out of the folder, and
            "links to folders" for those to folders, which are not followed.
        unreadable: folders and files that this user may not look at, or not now, with the reason.
            What is below them is not known.
    """

    files: tuple[Path, ...]
    passed_over: tuple[tuple[str, int], ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()


def look_at(path: Path | str) -> Found:
    """A file itself, of whatever kind, or all files below a folder.

    A link below a folder counts if it leads to a file in the folder that is not found otherwise.

    Raises:
        DocumentError: nothing is there.
    """
    root = Path(path).expanduser()
    return _Look(root, root.resolve()).found() if is_folder(root) else Found((root,))


def is_folder(path: Path) -> bool:
    """Whether a folder is there, or else a file.

    Raises:
        DocumentError: neither is.
    """
    try:
        is_file, is_one = path.is_file(), path.is_dir()
    except OSError as error:  # as for a name that is too long
        raise DocumentError(f"{path} cannot be looked at ({error})") from error
    if not (is_file or is_one):
        raise _missing(path)
    return is_one


def find_documents(path: Path | str) -> list[Path]:
    """The files of `look_at`: a file itself, or those below a folder that have a reader, sorted.

    Raises:
        DocumentError: nothing is there.
    """
    return list(look_at(path).files)


def is_hidden(path: Path) -> bool:
    """Whether the name of a file, or of a folder above it, begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def _missing(root: Path) -> DocumentError:
    return DocumentError(f"there is no file or folder at {root}")


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

    def found(self) -> Found:
        for file in self._walk():
            try:
                self._take(file)
            except OSError as error:  # in a folder whose names may be read, and nothing else
                self._note(error)
        files = tuple(sorted((self.links | self.files).values()))
        return Found(files, tuple(self.others.most_common()), tuple(self.unreadable.items()))

    def _walk(self) -> Iterator[Path]:
        """All that is in the folder and no folder, hidden files aside, in the order of names."""
        for place, folders, names in os.walk(self.root, onerror=self._note):
            folder = Path(place)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if count := sum(self._is_passed_over(folder / name) for name in folders):
                self.others[_FOLDERS] += count
            yield from (folder / name for name in sorted(names) if not name.startswith("."))

    def _is_passed_over(self, folder: Path) -> bool:
        """Whether a folder is a link to one of which not all files are found otherwise."""
        if not folder.is_symlink():
            return False
        target = folder.resolve()
        return not target.is_relative_to(self.inside) or is_hidden(target.relative_to(self.inside))

    def _take(self, file: Path) -> None:
        if not file.is_file():
            return
        target, suffix = file.resolve(), file.suffix.lower()
        if not target.is_relative_to(self.inside):
            self.others[_ELSEWHERE] += 1
        elif suffix not in READERS or target.suffix.lower() != suffix:
            self.others[suffix] += 1
        else:
            (self.links if file.is_symlink() else self.files)[target] = file

    def _note(self, error: OSError) -> None:
        """Remember what cannot be read; what is gone is no error, unless it is the root."""
        place = self.root if error.filename is None else Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            self.unreadable[place] = f"{place} cannot be looked at ({error.strerror})"
        elif place == self.root:
            raise _missing(self.root) from error
