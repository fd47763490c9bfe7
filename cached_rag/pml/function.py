"""`prompt_function`: a decorated Python function is a schema, and a call of it is a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import update_wrapper
from typing import Any

from cached_rag.errors import PMLError
from cached_rag.pml.program import read_function
from cached_rag.pml.schema import Schema, SchemaPrompt


class PromptFunction:
    """A function whose yielded strings are a prompt.

    Attributes:
        name: the function's name, and the schema's.
        program: the function as it was read.
        schema: all that the function may yield.
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
        found = Schema.from_program(self.program)
        self.schema = replace(found, layout=layout, behind=behind)

    def __call__(self, /, *args: Any, **kwargs: Any) -> SchemaPrompt:
        """The prompt for these arguments.

        Raises:
            TypeError: they are not the function's.
        """
        said = self.program.call(*args, **kwargs)
        return self.schema.prompt(*said.parts, **said.arguments)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the parameters that have no default."""
        return tuple(p.name for p in self._parameters if p.default is p.empty)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the parameters that have a default."""
        return tuple(p.name for p in self._parameters if p.default is not p.empty)

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p for p in inspect.signature(self).parameters.values() if p.kind not in kinds]

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


def system() -> AbstractContextManager[None]:
    """`with system():` in a prompt function: the text yielded inside is the system message."""
    return nullcontext()


def user() -> AbstractContextManager[None]:
    """As `system`, for the user's message."""
    return nullcontext()


def assistant() -> AbstractContextManager[None]:
    """As `system`, for an earlier answer of the assistant."""
    return nullcontext()
