"""Where another process may import modules from: not from where documents lie."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path


def trusted_path(documents: Path) -> list[str]:
    """This process's `sys.path` for a process that works on documents.

    Without the current folder, whatever spells it, and without folders at, below or above the
    documents: a document may be called `kreuzberg.py`, and a folder of documents `docutils`. The
    interpreter's own folders stay, even if they lie there: this process runs what is in them.

    Args:
        documents: the file or folder.
    """
    folder = documents.resolve()
    folder = folder if folder.is_dir() else folder.parent
    installed = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = [installed[name] for name in names] + site.getsitepackages()
    own.append(site.getusersitepackages())
    resolved = [Path(name).resolve() for name in own]

    def is_trusted(entry: str) -> bool:
        if not (isinstance(entry, str) and Path(entry).is_absolute()):
            return False
        place = Path(entry).resolve()
        if any(place.is_relative_to(one) for one in resolved):
            return True
        is_near = place.is_relative_to(folder) or folder.is_relative_to(place)
        return not is_near and place != _current()

    return [entry for entry in sys.path if is_trusted(entry)]


def _current() -> Path | None:
    try:
        return Path.cwd().resolve()
    except OSError:  # somebody removed it
        return None
