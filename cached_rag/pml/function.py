"""`prompt_function`: a decorated Python function is a schema, and a call of it a prompt.

Joins reading (`program.py`) and calling (`trace.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any

from cached_rag.errors import PMLError
from cached_rag.kv.fingerprint import digest
from cached_rag.pml.markup import Element
from cached_rag.pml.nodes import Where
from cached_rag.pml.parse import parse_schema
from cached_rag.pml.program import Program, read_function
from cached_rag.pml.prompt import Import
from cached_rag.pml.schema import Schema, SchemaPrompt
from cached_rag.pml.trace import tracer


class PromptFunction:
    """A function whose yielded strings are a prompt.

    Attributes:
        name: the function's; its schema's, too.
        schema: all that it may say.
    """

    def __init__(
        self, function: Callable[..., Any], layout: str = "auto", behind: str = "schema"
    ) -> None:
        """Read the function.

        Raises:
            PMLError: it does what a schema cannot say; the error names file and line.
        """
        source = read_function(function)
        self.name = function.__name__
        update_wrapper(self, function)
        self._program = Program(source)
        root = self._program.element("schema", self.name)
        node = parse_schema(root, source.file)
        self.schema = Schema(node, digest(repr(node)), layout, behind, source.file)
        self._trace = tracer(source, self._program.branches)

    def __call__(self, /, *args: Any, **kwargs: Any) -> SchemaPrompt:
        """The prompt for these arguments.

        Raises:
            TypeError: they are not the function's.
        """
        parts, arguments = self._trace(*args, **kwargs)
        return self.schema.prompt(*parts, **arguments)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the parameters that have no default."""
        return tuple(p.name for p in self._parameters if p.default is p.empty)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the parameters that have one."""
        return tuple(p.name for p in self._parameters if p.default is not p.empty)

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p for p in inspect.signature(self).parameters.values() if p.kind not in kinds]

    def fill(self, /, **values: object) -> SchemaPrompt:
        """As a call, by keywords."""
        return self(**values)

    def __get__(self, instance: object, owner: type | None = None) -> PromptFunction:
        """Refuse to be a method.

        Raises:
            PMLError: it was called on an object, whose `self` a prompt does not have.
        """
        if instance is not None:
            raise PMLError(f"{self.name!r} is a method; a prompt function stands by itself")
        return self

    def trace(self, /, *args: Any, **kwargs: Any) -> tuple[list[Import], dict[str, str]]:
        """What a call imports, and the arguments that it gives outside all modules."""
        return self._trace(*args, **kwargs)

    def module_of(self, name: str, where: Where) -> Element:
        """The function as a module of another one."""
        return self._program.element("module", name, where)


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
    """`with system():` in a prompt function: what is yielded inside is the system's message."""
    return nullcontext()


def user() -> AbstractContextManager[None]:
    """As `system`, for the user's message."""
    return nullcontext()


def assistant() -> AbstractContextManager[None]:
    """As `system`, for an answer shown to the model."""
    return nullcontext()
