"""What makes prompts from named values: templates with `{variables}`, and Python functions.

Values are put in after a prompt is parsed, so they are text and cannot become PML.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, ClassVar

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Element, Where, nearest, parse_markup
from cached_rag.pml.program import read_function
from cached_rag.pml.prompt import Import, Part, Said, parse_prompt
from cached_rag.pml.schema import Schema, SchemaPrompt

# What braces may be: doubled, around a variable, or alone, which is a mistake.
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class SchemaTemplate:
    """A prompt with `{variables}` in its texts and arguments; braces are written `{{` and `}}`.

    Attributes:
        variables: their names, in order of appearance.
    """

    schema: Schema
    imported: Import
    variables: tuple[str, ...]
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_string(cls, schema: Schema, source: str) -> SchemaTemplate:
        """Parse a <prompt> with variables.

        Raises:
            PMLError: it is not valid, or of another schema.
        """
        root = parse_markup(source)
        names = dict.fromkeys(_names(root), "")  # here, where places are known
        found = cls(schema, parse_prompt(root, schema.name), tuple(names))
        found.fill(**names)  # finds mistakes now, not at the first call
        return found

    def fill(self, /, **values: object) -> SchemaPrompt:
        """The prompt for these values.

        Raises:
            PMLError: a value is missing.
        """
        for name in self.variables:
            if name not in values:
                raise PMLError(f"no value for {{{name}}}{nearest(name, values)}")
        return SchemaPrompt(self.schema, _filled(self.imported, values))


def _filled(asked: Import, values: Mapping[str, object]) -> Import:
    """An import with values; of a text whose values are empty nothing is left."""
    parts: list[Part] = []
    for part in asked.parts:
        if isinstance(part, Import):
            parts.append(_filled(part, values))
        elif isinstance(part, Said):
            parts.append(replace(part, text=part.text.format(**values)))
        elif text := part.format(**values):
            parts.append(text)
    arguments = {name: text.format(**values) for name, text in asked.arguments.items()}
    return Import(asked.name, *parts, **arguments).at(asked.where)


def _names(element: Element) -> Iterator[str]:
    """The names of variables in an element's attributes and texts, in order.

    Raises:
        PMLError: a brace alone, or a field that is more than a name; it names the place. Behind
            `&lt;` and the like, which are shorter when they are read, the column is a smaller one.
    """
    for value in element.attributes.values():
        yield from _names_in(value, element.where)
    for part in element.content:
        inside = _names(part) if isinstance(part, Element) else _names_in(part.text, part.where)
        yield from inside


def _names_in(text: str, where: Where) -> Iterator[str]:
    for brace in _BRACES.finditer(text):
        name = brace[1]
        if brace[0] in ("{{", "}}"):
            continue
        if name is None:
            why = f"braces in {text!r}: one stands alone; write {{{{ and }}}} for braces"
        elif not name.isidentifier():
            why = f"{brace[0]} is no variable; variables are names, and braces are {{{{ and }}}}"
        else:
            yield name
            continue
        raise PMLError(why, _within(text, brace.start(), where))


def _within(text: str, at: int, where: Where) -> Where:
    """The place of a text's character, if the text begins `where`."""
    before = text[:at]
    lines = before.count("\n")
    column = at - before.rfind("\n") if lines else where.column + at
    return where._replace(line=where.line + lines, column=column)


class PromptFunction:
    """A function whose yielded strings are a prompt.

    Attributes:
        name: the function's name, and the schema's.
        program: the function as it was read.
        schema: all that the function may yield.
        variables: names of the parameters that have no default.
        optional: names of those that have one.
    """

    def __init__(
        self, function: Callable[..., Any], layout: str = "auto", behind: str = "schema"
    ) -> None:
        """Read the function.

        Raises:
            PMLError: it does what a schema cannot say; the error names file and line.
        """
        self.program = read_function(function)
        self.name = self.program.name
        update_wrapper(self, function)
        self.schema = Schema.from_program(self.program, layout, behind)
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        every = inspect.signature(function).parameters.values()
        named = [one for one in every if one.kind not in kinds]
        self.variables = tuple(one.name for one in named if one.default is one.empty)
        self.optional = tuple(one.name for one in named if one.default is not one.empty)

    def __call__(self, /, *args: Any, **kwargs: Any) -> SchemaPrompt:
        """The prompt for these arguments.

        Raises:
            TypeError: they are not the function's.
        """
        return SchemaPrompt(self.schema, self.program.call(*args, **kwargs))

    def fill(self, /, **values: object) -> SchemaPrompt:
        """As a call with keyword arguments."""
        return self(**values)

    def __get__(self, instance: object, owner: type | None = None) -> PromptFunction:
        """Refuse to be a method, since a prompt has no `self`.

        Raises:
            PMLError: it was looked up on an object.
        """
        if instance is not None:
            raise PMLError(f"{self.name!r} is a method; a prompt function stands by itself")
        return self


# What `variables`, `optional` and `fill` make prompts of, for templates of frameworks.
Fillable = SchemaTemplate | PromptFunction


def sent(source: Fillable, values: Mapping[str, object]) -> str | list[dict[str, str]]:
    """The prompt for those of the values that it has a place for, as `SchemaPrompt.sent` gives it.

    Raises:
        PMLError: a value is missing.
    """
    known = (*source.variables, *source.optional)
    return source.fill(**{name: values[name] for name in known if name in values}).sent()


def prompt_function(
    function: Callable[..., Any] | None = None, *, layout: str = "auto", behind: str = "schema"
) -> Any:
    """Decorate a generator of strings: `if`, `match` and calls become modules and unions.

    Args:
        layout, behind: as `Schema` has them.

    Raises:
        PMLError: it does what a schema cannot say.
    """
    if function is None:
        return lambda f: PromptFunction(f, layout, behind)
    return PromptFunction(function, layout, behind)


# `with user():` in a prompt function: the text yielded inside is a message of that role.
system = user = assistant = nullcontext
