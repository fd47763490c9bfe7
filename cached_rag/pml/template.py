"""Prompt templates for frameworks: a prompt whose texts and arguments have variables.

Values are put in after the prompt is parsed, so they are text and cannot become PML.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Element, nearest, parse_markup
from cached_rag.pml.nodes import Where
from cached_rag.pml.prompt import Import, Part, Said
from cached_rag.pml.schema import Schema, SchemaPrompt

_FORMATTER = string.Formatter()
_OPENED = re.compile(r"\{\{|\{")
# What braces may be: doubled, around a field, or alone, which is the mistake.
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_NOWHERE = Where()


class Fillable(Protocol):
    """Makes prompts from named values: a `SchemaTemplate` or a `PromptFunction`."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the values that must be given."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the values that may be given."""
        ...

    def fill(self, /, **values: object) -> SchemaPrompt:
        """The prompt for these values."""
        ...


@dataclass(frozen=True)
class SchemaTemplate:
    """A prompt with `{variables}` in its texts and arguments; braces are written `{{` and `}}`."""

    schema: Schema
    parts: tuple[Part, ...]
    arguments: Mapping[str, str]
    optional = ()

    @classmethod
    def from_string(cls, schema: Schema, source: str) -> SchemaTemplate:
        """Parse a <prompt> with variables.

        Raises:
            PMLError: it is not valid, or of another schema.
        """
        prompt = schema.prompt_from_string(source)
        check_names(parse_markup(source))  # here, where places are known
        found = cls(schema, prompt.parts, prompt.arguments)
        found.fill(
            **dict.fromkeys(found.variables, "")
        )  # finds mistakes now, not at the first call
        return found

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables, in order of appearance."""
        texts = [*self.arguments.values(), *_texts(self.parts)]
        return tuple(dict.fromkeys(name for text in texts for name in names(text)))

    def fill(self, /, **values: object) -> SchemaPrompt:
        """The prompt for these values.

        Raises:
            PMLError: a value is missing.
        """
        for name in self.variables:
            if name not in values:
                raise PMLError(f"no value for {{{name}}}{nearest(name, values)}")
        arguments = {name: text.format(**values) for name, text in self.arguments.items()}
        return self.schema.prompt(*_filled(self.parts, values), **arguments)


def _texts(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Import):
            yield from part.arguments.values()
            yield from _texts(part.parts)
        else:
            yield part.text if isinstance(part, Said) else part


def _filled(parts: Sequence[Part], values: Mapping[str, object]) -> list[Part]:
    """The parts with their values; of a text whose values are empty nothing is left."""
    filled = (_fill(part, values) for part in parts)
    return [part for part in filled if part != ""]


def _fill(part: Part, values: Mapping[str, object]) -> Part:
    if isinstance(part, str):
        return part.format(**values)
    if isinstance(part, Said):
        return replace(part, text=part.text.format(**values))
    inside = _filled(part.parts, values)
    arguments = {name: text.format(**values) for name, text in part.arguments.items()}
    return Import(part.name, *inside, **arguments).at(part.where)  # type: ignore[arg-type]


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
