"""A Python function as a prompt program: its schema, and what a call of it imports.

The schema is read off the function's syntax tree, so it has every branch (`syntax.py`). For a call,
the tree is rewritten so that each branch yields its module's name, compiled again, and run with the
call's arguments: so the function's own conditions decide which modules the prompt imports.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Element
from cached_rag.pml.nodes import Where
from cached_rag.pml.prompt import Import
from cached_rag.pml.syntax import KEEP_SPACE, Content, Reader, where_of

# What a rewritten function yields: the name of a module that begins, None where it ends, or
# arguments of the module that is open.
Event = str | dict[str, object] | None


@dataclass(frozen=True)
class MaxTokens:
    """Marks a parameter that is put into the prompt: `days: Annotated[str, MaxTokens(5)]`."""

    length: int


@dataclass(frozen=True)
class Program:
    """A prompt function as it was read.

    Attributes:
        where: the place of its definition.
        content: all that it may yield, as PML.
        events: the rewritten function, with the function's own parameters; see `Event`.
    """

    name: str
    file: str
    where: Where
    content: Content
    events: Callable[..., Iterator[Event]]

    def element(self, tag: str, name: str, where: Where) -> Element:
        """The function as a <schema>, or as a <module> in a function that calls it."""
        return Element(tag, {"name": name, **KEEP_SPACE}, where, self.content)

    def call(self, /, *args: Any, **kwargs: Any) -> Import:
        """What a call imports, as one import that stands for the whole schema.

        Raises:
            TypeError: the arguments are not the function's.
        """
        return _imported(self.name, self.events(*args, **kwargs))


def _imported(name: str, events: Iterator[Event]) -> Import:
    """The import of a module, from its events up to the one that ends it."""
    parts: list[Import | str] = []
    arguments: dict[str, object] = {}
    for event in events:
        if event is None:
            break
        if isinstance(event, str):
            parts.append(_imported(event, events))
        else:
            arguments |= event
    return Import(name, *parts, **arguments)


def read_function(function: Callable[..., Any]) -> Program:
    """Read a function without running it.

    Raises:
        PMLError: its source cannot be read (it was typed at a prompt), it is no plain function, or
            it does what a schema cannot express; the error names file and line.
    """
    try:
        file = inspect.getsourcefile(function) or "<unknown>"
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise PMLError(f"the source of {function!r} cannot be read: {error}") from error
    # An indented function is parsed inside a block: dedenting it would change its strings, too.
    is_inside = lines[0][:1].isspace()
    block: Any = ast.parse("".join(["if True:\n" if is_inside else "", *lines])).body[0]
    tree = block.body[0] if is_inside else block
    where = Where(first, 1)
    if not isinstance(tree, ast.FunctionDef) or hasattr(function, "__wrapped__"):
        raise PMLError("a prompt function is a plain `def`, decorated by nothing else", where, file)
    ast.increment_lineno(tree, first - 1 - is_inside)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise PMLError(
            f"an annotation names what the module does not have: {error}; write the number of "
            "MaxTokens out, or define it at the top of the module",
            where,
            file,
        ) from error
    lengths = {name: mark.length for name, hint in hints.items() for mark in _marks(hint)}
    code = function.__code__
    hidden = {*code.co_varnames, *code.co_cellvars}  # parameters, and what is assigned to
    scope = {name: value for name, value in _scope(function).items() if name not in hidden}
    content = Reader(file, lengths, scope).block(tree.body)
    return Program(tree.name, file, where_of(tree), content, _compiled(function, tree, file))


def _marks(hint: Any) -> Iterator[MaxTokens]:
    """Every MaxTokens in an annotation, also in `Annotated[str, MaxTokens(3)] | None`."""
    for part in get_args(hint):
        if isinstance(part, MaxTokens):
            yield part
        else:
            yield from _marks(part)


def _scope(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's globals, and the variables that it closes over as far as they are bound."""
    found = dict(function.__globals__)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # bound later
            found[name] = cell.cell_contents
    return found


def _compiled(
    function: Callable[..., Any], tree: ast.FunctionDef, file: str
) -> Callable[..., Iterator[Event]]:
    """A generator of events with the function's parameters, from its rewritten syntax tree."""
    tree.body.append(
        ast.Expr(ast.Yield(ast.Dict([], [])))
    )  # makes it a generator, even without text
    tree.decorator_list, tree.returns = [], None
    spec = tree.args
    for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg):
        if arg is not None:
            arg.annotation = None
    # `events` binds the original's defaults; these constants only keep the signature.
    spec.defaults = [ast.Constant(None) for _ in spec.defaults]
    spec.kw_defaults = [d and ast.Constant(None) for d in spec.kw_defaults]
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), file, "exec")
    signature = inspect.signature(function)

    def events(*args: Any, **kwargs: Any) -> Iterator[Event]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Globals are looked up at the call, as in any function: they may be defined below it.
        scope = _scope(function)
        exec(code, scope)  # the user's own code, rewritten
        found: Iterator[Event] = scope[tree.name](*bound.args, **bound.kwargs)
        return found

    return events
