"""Python functions as schemas: what a function may yield becomes modules, unions and parameters.

Prompt Cache (MLSys version), section 3.2.4: `if` becomes a module, `if`/`elif`/`else` and `match`
become unions, a call of another prompt function a nested module, and a parameter has a greatest
length. The schema is read off the function's syntax tree, whatever its arguments will be; see
`trace.py` for what a call makes of it. Knows syntax; runs nothing.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element
from cached_rag.pml.nodes import ROLES, Where
from cached_rag.pml.parse import RESERVED

_KEEP = {"xml:space": "preserve"}
_OTHERWISE = "otherwise"


@dataclass(frozen=True)
class MaxTokens:
    """Marks a function's parameter as a prompt's: `days: Annotated[str, MaxTokens(5)]`."""

    length: int


@dataclass(frozen=True)
class Source:
    """A function's syntax, and what its names mean.

    Attributes:
        tree: the function's definition; its lines count as in its file.
        lengths: of its prompt parameters, by name.
        scope: globals and what the function closes over.
    """

    function: Callable[..., Any]
    tree: ast.FunctionDef
    file: str
    lengths: Mapping[str, int]
    scope: Mapping[str, Any]

    def fail(self, what: str, node: ast.AST) -> PMLError:
        """An error at a place in the function."""
        where = Where(getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1)
        return PMLError(what, where, self.file)


def read_function(function: Callable[..., Any]) -> Source:
    """A function's source.

    Raises:
        PMLError: it cannot be had (typed at a prompt), or is no plain function.
    """
    try:
        file = inspect.getsourcefile(function) or "<unknown>"
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise PMLError(f"the source of {function!r} cannot be read: {error}") from error
    # In a block of its own, so that neither its indentation nor that of its strings is touched.
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
    scope = {**function.__globals__, **closed_over(function)}
    for name in inspect.signature(function).parameters:
        scope.pop(name, None)
    return Source(function, tree, file, lengths, scope)


def _marks(hint: Any) -> Iterator[MaxTokens]:
    """MaxTokens anywhere in an annotation, as in `Annotated[str, MaxTokens(3)] | None`."""
    for part in get_args(hint):
        if isinstance(part, MaxTokens):
            yield part
        else:
            yield from _marks(part)


def closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, as far as it is bound yet."""
    found = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # bound later
            found[name] = cell.cell_contents
    return found


@dataclass
class Program:
    """A schema's elements, and the names that the function's branches have in it.

    Attributes:
        branches: names of modules, by the id of the statements or the call that they stand for.
    """

    source: Source
    branches: dict[int, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def element(self, tag: str, name: str, where: Where | None = None) -> Element:
        """The function as a <schema>, or as a <module> for those who call it."""
        place = where or self._where(self.source.tree)
        self._taken = set()
        root = Element(tag, {"name": name, **_KEEP}, place)
        root.content = self.block(self.source.tree.body)
        return root

    def block(self, body: list[ast.stmt]) -> list[Element | Chars]:
        """What a list of statements may yield."""
        found: list[Element | Chars] = []
        for part in (part for statement in body for part in self._statement(statement)):
            last = found[-1] if found else None
            if isinstance(part, Chars) and isinstance(last, Chars):
                last.text += part.text
            else:
                found.append(part)
        return found

    def _statement(self, node: ast.stmt) -> list[Element | Chars]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            return self._yielded(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
            return [self._call(node.value)]
        if isinstance(node, ast.If):
            return [self._if(node)]
        if isinstance(node, ast.Match):
            return [self._match(node)]
        if isinstance(node, ast.With):
            return [self._message(node)]
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Pass | ast.Assign | ast.AnnAssign):
            self._refuse_yields(node)
            return []
        raise self.source.fail(
            f"a prompt function cannot use `{type(node).__name__.lower()}`: it yields text, "
            "branches by if and match, and yields from other prompt functions, so that all it may "
            "say is known before it runs",
            node,
        )

    def _refuse_yields(self, node: ast.AST | None) -> None:
        for inner in ast.walk(node) if node is not None else ():
            if isinstance(inner, ast.Yield | ast.YieldFrom):
                raise self.source.fail("`yield` is a statement of its own here", inner)

    # Text ------------------------------------------------------------------------------------

    def _yielded(self, node: ast.Yield) -> list[Element | Chars]:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return [Chars(value.value, self._where(value))]
        if isinstance(value, ast.JoinedStr):
            return [self._part(part) for part in value.values]
        if isinstance(value, ast.Name):
            return [self._part(ast.FormattedValue(value, -1))]
        raise self.source.fail(
            "yield a string or an f-string; what changes goes into parameters marked with "
            "MaxTokens",
            node,
        )

    def _part(self, part: ast.expr) -> Element | Chars:
        if isinstance(part, ast.Constant):
            return Chars(str(part.value), self._where(part))
        assert isinstance(part, ast.FormattedValue)
        name = part.value.id if isinstance(part.value, ast.Name) else ""
        if name in self.source.lengths:
            if part.conversion != -1 or part.format_spec is not None:
                raise self.source.fail(f"{{{name}}} cannot be formatted in a prompt function", part)
            length = str(self.source.lengths[name])
            return Element("param", {"name": name, "len": length}, self._where(part.value))
        constant = self.source.scope.get(name)
        if isinstance(constant, str):
            return Chars(constant, self._where(part.value))
        shown = ast.unparse(part.value)
        raise self.source.fail(
            f"{{{shown}}} is neither a parameter marked with MaxTokens nor a constant string; "
            f"write `{name or 'name'}: Annotated[str, MaxTokens(16)]` in the function's head",
            part.value,
        )

    # Branches --------------------------------------------------------------------------------

    def _if(self, node: ast.If) -> Element:
        arms = list(arms_of(node))
        for part in ast.walk(node):
            if isinstance(part, ast.If):
                self._refuse_yields(part.test)
        if len(arms) == 1:
            return self._arm(*arms[0])
        union = Element("union", _KEEP, self._where(node))
        union.content = [self._arm(*arm) for arm in arms]
        return union

    def _match(self, node: ast.Match) -> Element:
        union = Element("union", _KEEP, self._where(node))
        self._refuse_yields(node.subject)
        for case in node.cases:
            self._refuse_yields(case.guard)
            guard = f" if {ast.unparse(case.guard)}" if case.guard is not None else ""
            shown = ast.unparse(case.pattern) + guard
            union.content.append(self._arm(_OTHERWISE if shown == "_" else shown, case.body))
        return union

    def _arm(self, shown: str, body: list[ast.stmt]) -> Element:
        """One branch as a module."""
        name = self._name(shown)
        self.branches[id(body)] = name
        outer, self._taken = self._taken, set()
        element = Element("module", {"name": name, **_KEEP}, self._where(body[0]))
        element.content = self.block(body)
        self._taken = outer
        return element

    def _call(self, node: ast.YieldFrom) -> Element:
        called: Any = self.source.scope.get(_called(node.value))
        if not hasattr(called, "module_of"):
            raise self.source.fail(
                "yield from another prompt function, called by its name; "
                f"{ast.unparse(node.value)} is none",
                node,
            )
        name = self._name(called.name)
        self.branches[id(node)] = name
        module: Element = called.module_of(name, self._where(node))
        return module

    def _message(self, node: ast.With) -> Element:
        role = _called(node.items[0].context_expr)
        if role not in ROLES or len(node.items) != 1:
            raise self.source.fail("`with` takes system(), user() or assistant() here", node)
        element = Element(role, _KEEP, self._where(node))
        element.content = self.block(node.body)
        return element

    def _name(self, shown: str) -> str:
        """A module's name after what it says in the source, unlike those beside it."""
        base = re.sub(r"[^\w.\-]+", "-", shown).strip("-.") or "branch"
        is_name = (base[0].isalpha() or base[0] == "_") and base not in RESERVED
        base = base if is_name else f"case-{base}"
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}-{count}"
        self._taken.add(name)
        return name

    def _where(self, node: ast.AST) -> Where:
        return Where(getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1)


def _called(node: ast.expr) -> str:
    """The name of what is called; empty if it is no call of a name."""
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if is_named else ""  # type: ignore[attr-defined]


def arms_of(node: ast.If) -> Iterator[tuple[str, list[ast.stmt]]]:
    """What `if`, every `elif` and `else` say, and their statements."""
    yield ast.unparse(node.test), node.body
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        yield from arms_of(node.orelse[0])
    elif node.orelse:
        yield _OTHERWISE, node.orelse
