"""The `{variables}` in a prompt's texts, and where in its source one is wrong. Knows no schema."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Element
from cached_rag.pml.nodes import Where

_FORMATTER = string.Formatter()
_OPENED = re.compile(r"\{\{|\{")
# What braces may be: doubled, around a field, or alone, which is the mistake.
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_NOWHERE = Where()


def names(text: str, where: Where = _NOWHERE) -> Iterator[str]:
    """The names of a text's variables, in order.

    Args:
        where: the text's beginning, for errors.

    Raises:
        PMLError: a brace alone, or a field that is more than a name.
    """
    try:
        fields = list(_FORMATTER.parse(text))
    except ValueError as error:
        lone = (found.start() for found in _BRACES.finditer(text) if len(found[0]) == 1)
        place = _within(text, next(lone, 0), where)
        raise PMLError(f"braces in {text!r}: {error}; write {{{{ and }}}} for braces", place) from (
            error
        )
    for _, name, spec, conversion in fields:
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise PMLError(
                f"{{{name}}} is no variable; variables are names, and braces are {{{{ and }}}}",
                _within(text, _place_of(name, text), where),
            )
        yield name


def check_names(element: Element) -> None:
    """See that the braces in an element's attributes and texts are variables.

    Raises:
        PMLError: they are not; it names the place. Behind `&lt;` and the like, which are shorter
            when they are read, the column is a smaller one.
    """
    for value in element.attributes.values():
        list(names(value, element.where))
    for part in element.content:
        if isinstance(part, Element):
            check_names(part)
        else:
            list(names(part.text, part.where))


def _place_of(name: str, text: str) -> int:
    """Where the field that begins with this name is opened."""
    opened = (at for at in _OPENED.finditer(text) if len(at[0]) == 1)
    return next((at.start() for at in opened if text.startswith(name, at.end())), 0)


def _within(text: str, at: int, where: Where) -> Where:
    """The place of a text's character, if the text begins `where`."""
    if not where.line:
        return where
    before = text[:at]
    lines = before.count("\n")
    column = at - before.rfind("\n") if lines else where.column + at
    return Where(where.line + lines, column)
