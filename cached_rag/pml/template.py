"""Prompt templates for frameworks: a prompt whose texts and arguments have variables.

Values are put in after the prompt is parsed, so they are text and cannot become PML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cached_rag.errors import PMLError
from cached_rag.pml.markup import nearest, parse_markup
from cached_rag.pml.prompt import Import, Part, Said
from cached_rag.pml.schema import Schema, SchemaPrompt
from cached_rag.pml.variables import check_names, names


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
