"""Python statements as PML: what they may yield becomes texts, modules, unions and parameters.

`if` becomes a module, `if`/`elif`/`else` and `match` become unions, a call of another prompt
function a nested module (Prompt Cache, MLSys version, section 3.2.4). Knows syntax; runs nothing.

The statements are also rewritten. The texts are in the schema, so the rewritten statements do not
yield them. They yield which modules a call imports: a name where a module begins, None where it
ends, and a dictionary of arguments for the module that is open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element
from cached_rag.pml.nodes import ROLES, Where
from cached_rag.pml.parse import RESERVED

KEEP_SPACE = {"xml:space": "preserve"}
_OTHERWISE = "otherwise"

Content = list[Element | Chars]
# What a statement may yield, as PML, and the statements that replace it.
Read = tuple[Content, list[ast.stmt]]


@dataclass
class Reader:
    """Reads and rewrites the statements of one function.

    Attributes:
        lengths: most tokens of each parameter marked with MaxTokens, by name.
        scope: values of names that are known before the function runs.
    """

    file: str
    lengths: Mapping[str, int]
    scope: Mapping[str, Any]
    _taken: set[str] = field(default_factory=set)

    def block(self, body: list[ast.stmt]) -> Content:
        """The PML of a list of statements; replaces the statements in the list."""
        found: Content = []
        rewritten: list[ast.stmt] = []
        for statement in body:
            said, run = self._statement(statement)
            rewritten += run
            for part in said:
                last = found[-1] if found else None
                if isinstance(part, Chars) and isinstance(last, Chars):
                    last.text += part.text
                else:
                    found.append(part)
        body[:] = rewritten
        return found

    def _statement(self, node: ast.stmt) -> Read:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            return self._text(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
            return self._call(node.value)
        if isinstance(node, ast.If):
            return [self._if(node)], [node]
        if isinstance(node, ast.Match):
            return [self._match(node)], [node]
        if isinstance(node, ast.With):
            return [self._message(node)], node.body
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Pass | ast.Assign | ast.AnnAssign):
            self._refuse_yields(node)
            return [], [node]
        raise self._fail(
            f"a prompt function cannot use `{type(node).__name__.lower()}`: it yields text, "
            "branches by if and match, and yields from other prompt functions, so that all it may "
            "say is known before it runs",
            node,
        )

    def _refuse_yields(self, node: ast.AST | None) -> None:
        for inner in ast.walk(node) if node is not None else ():
            if isinstance(inner, ast.Yield | ast.YieldFrom):
                raise self._fail("`yield` is a statement of its own here", inner)

    # Text ------------------------------------------------------------------------------------

    def _text(self, node: ast.Yield) -> Read:
        value = node.value
        if isinstance(value, ast.JoinedStr):
            said = [self._part(part) for part in value.values]
        elif isinstance(value, ast.Name):
            said = [self._part(ast.FormattedValue(value, -1))]
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            said = [self._part(value)]
        else:
            raise self._fail(
                "yield a string or an f-string; what changes goes into parameters marked with "
                "MaxTokens",
                node,
            )
        names = [part.attributes["name"] for part in said if isinstance(part, Element)]
        keys: list[ast.expr | None] = [ast.Constant(name) for name in names]
        given = ast.Dict(keys, [ast.Name(name, ast.Load()) for name in names])
        return said, [_say(given)] if names else []

    def _part(self, part: ast.expr) -> Element | Chars:
        if isinstance(part, ast.Constant):
            return Chars(str(part.value), where_of(part))
        assert isinstance(part, ast.FormattedValue)
        name = part.value.id if isinstance(part.value, ast.Name) else ""
        if name in self.lengths:
            if part.conversion != -1 or part.format_spec is not None:
                raise self._fail(f"{{{name}}} cannot be formatted in a prompt function", part)
            length = str(self.lengths[name])
            return Element("param", {"name": name, "len": length}, where_of(part.value))
        constant = self.scope.get(name)
        if isinstance(constant, str):
            return Chars(constant, where_of(part.value))
        shown = ast.unparse(part.value)
        raise self._fail(
            f"{{{shown}}} is neither a parameter marked with MaxTokens nor a constant string; "
            f"write `{name or 'name'}: Annotated[str, MaxTokens(16)]` in the function's head",
            part.value,
        )

    # Branches --------------------------------------------------------------------------------

    def _if(self, node: ast.If) -> Element:
        arms = [self._arm(shown, body) for shown, body in self._arms(node)]
        return arms[0] if len(arms) == 1 else _union(arms, node)

    def _arms(self, node: ast.If) -> Iterator[tuple[str, list[ast.stmt]]]:
        """The condition of `if`, each `elif` and `else`, as source text, with its statements."""
        self._refuse_yields(node.test)
        yield ast.unparse(node.test), node.body
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            yield from self._arms(node.orelse[0])
        elif node.orelse:
            yield _OTHERWISE, node.orelse

    def _match(self, node: ast.Match) -> Element:
        self._refuse_yields(node.subject)
        arms = []
        for case in node.cases:
            self._refuse_yields(case.guard)
            guard = f" if {ast.unparse(case.guard)}" if case.guard is not None else ""
            shown = ast.unparse(case.pattern) + guard
            arms.append(self._arm(_OTHERWISE if shown == "_" else shown, case.body))
        return _union(arms, node)

    def _arm(self, shown: str, body: list[ast.stmt]) -> Element:
        """One branch as a module; its rewritten statements yield the module's begin and end."""
        name, where = self._name(shown), where_of(body[0])
        outer, self._taken = self._taken, set()
        content = self.block(body)
        self._taken = outer
        body[:] = [_say(ast.Constant(name)), *body, _say(ast.Constant(None))]
        return Element("module", {"name": name, **KEEP_SPACE}, where, content)

    def _call(self, node: ast.YieldFrom) -> Read:
        called = self.scope.get(_called(node.value))
        program = getattr(called, "program", None)
        if program is None:
            raise self._fail(
                "yield from another prompt function, called by its name; "
                f"{ast.unparse(node.value)} is none",
                node,
            )
        assert isinstance(node.value, ast.Call)
        name = self._name(program.name)
        for attribute in ("program", "events"):
            node.value.func = ast.Attribute(node.value.func, attribute, ast.Load())
        run = [_say(ast.Constant(name)), ast.Expr(node), _say(ast.Constant(None))]
        return [program.element("module", name, where_of(node))], run

    def _message(self, node: ast.With) -> Element:
        role = _called(node.items[0].context_expr)
        if role not in ROLES or len(node.items) != 1:
            raise self._fail("`with` takes system(), user() or assistant() here", node)
        return Element(role, KEEP_SPACE, where_of(node), self.block(node.body))

    def _name(self, shown: str) -> str:
        """A valid module name made of source text, different from the names beside it."""
        base = re.sub(r"[^\w.\-]+", "-", shown).strip("-.") or "branch"
        is_name = (base[0].isalpha() or base[0] == "_") and base not in RESERVED
        base = base if is_name else f"case-{base}"
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}-{count}"
        self._taken.add(name)
        return name

    def _fail(self, what: str, node: ast.AST) -> PMLError:
        return PMLError(what, where_of(node), self.file)


def where_of(node: ast.AST) -> Where:
    """The place of a syntax node in its file."""
    return Where(getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1)


def _union(arms: list[Element], node: ast.AST) -> Element:
    return Element("union", KEEP_SPACE, where_of(node), [*arms])


def _called(node: ast.expr) -> str:
    """The name of the function that is called; empty if `node` is no call by name."""
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if is_named else ""  # type: ignore[attr-defined]


def _say(what: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Yield(what))
