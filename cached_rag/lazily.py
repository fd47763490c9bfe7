"""Packages whose names are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def imports_from(
    places: Mapping[str, Sequence[str]], module: str, package: str
) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562), which raises AttributeError for other names.

    Args:
        places: the names, by the module below `package` that has them.
        module: whose names they are.
    """
    homes = {name: place for place, names in places.items() for name in names}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
