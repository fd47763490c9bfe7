"""Chunks that a search found, and filters on them: which it may find. Knows no index."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from cached_rag.errors import ConfigError
from cached_rag.rag.document import Metadata, shown

# Characters of a title: that of a text without one is its first paragraph.
_TITLE = 60
# Fields that every chunk has; all others are metadata.
FIELDS = ("source", "title", "ordinal")
# Most characters of a value, for patterns take time quadratic in their length to be read.
_LONGEST = 4000


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
        return f"{self.score:.2f}  {self._name}  {self._title}"

    def __repr__(self) -> str:
        return f"<Hit {self.score:.2f} {self._name} {self._title!r}>"

    @property
    def _name(self) -> str:
        page = f" p. {self.metadata['page']}" if "page" in self.metadata else ""
        return f"{shown(self.source)} #{self.ordinal}{page}"

    @property
    def _title(self) -> str:
        is_long = len(self.title) > _TITLE
        return f"{self.title[:_TITLE].rstrip()} ..." if is_long else self.title


# What the values of some fields have to be, by the fields' names; or a function that judges a hit.
Where = Mapping[str, object] | Callable[[Hit], bool]


def judge(where: Where, known: Collection[str]) -> Callable[[Hit], bool]:
    """A filter as a function of a hit.

    Args:
        where: for each field the value it has to have: a string, in which `*`, `?` and `[...]`
            stand for other characters ("docs/guide/*"); a number; or a collection of such values,
            one of which has to fit (`range(3, 9)`). A chunk without the field does not fit.
        known: names of the metadata there are.

    Raises:
        ConfigError: a field that no chunk has, or a value of another kind.
    """
    if callable(where):
        return where
    for name, wanted in where.items():
        if name not in FIELDS and name not in known:
            names = ", ".join([*FIELDS, *sorted(known)])
            raise ConfigError(f"no chunk has a field {name!r} to filter by; there are: {names}")
        if any(isinstance(value, str) and len(value) > _LONGEST for value in _several(wanted)):
            raise ConfigError(
                f"a filter's value has at most {_LONGEST} characters; {name!r} has more"
            )
        if not all(isinstance(value, str | int | float) for value in _several(wanted)):
            raise ConfigError(
                f"a filter's value is a string, a number, or a collection of these; {name!r} has "
                f"{wanted!r}"
            )
    return lambda hit: all(_fits(_value(hit, name), wanted) for name, wanted in where.items())


def described(metadata: Mapping[str, object]) -> Metadata:
    """What a user says of a document, checked.

    Raises:
        ConfigError: a name that stands for something else, or a value that is no string or number.
    """
    for name, value in metadata.items():
        is_plain = isinstance(value, str) or (
            isinstance(value, int | float) and math.isfinite(value)
        )
        if name in (*FIELDS, "text", "score") or not is_plain:
            raise ConfigError(
                "metadata are strings and finite numbers, by names other than "
                f"{', '.join(FIELDS)}, text and score; got {name!r}: {value!r}"
            )
    return dict(metadata)  # type: ignore[arg-type]


def _several(wanted: object) -> Collection[object]:
    if isinstance(wanted, range):
        return wanted[:1]  # it may be wide, and all are numbers
    if isinstance(wanted, Collection) and not isinstance(wanted, str | bytes | Mapping):
        return wanted
    return [wanted]


def _value(hit: Hit, name: str) -> object:
    return getattr(hit, name) if name in FIELDS else hit.metadata.get(name)


def _fits(found: object, wanted: object) -> bool:
    if found is None:
        return False
    if isinstance(wanted, str):
        return str(found) == wanted or fnmatchcase(str(found), wanted)
    if isinstance(wanted, range):
        with suppress(ValueError):
            return found in wanted or int(str(found)) in wanted
        return False
    if isinstance(wanted, Collection):
        return any(_fits(found, one) for one in wanted)
    return found == wanted or str(found) == str(wanted)
