"""Which branches a prompt function takes for given arguments. Knows Python; knows no PML text.

The function's own conditions decide, run as they are: its syntax tree is compiled anew with each
branch saying its name on the way in. What it would yield is known already (`program.py`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from cached_rag.pml.program import Source, closed_over
from cached_rag.pml.prompt import Import

_EVENTS = "__cached_rag_events__"


class Events:
    """Collects what a running function says, as imports of the modules that it enters."""

    def __init__(self) -> None:
        self._open: list[tuple[str, list[Import], dict[str, str]]] = [("", [], {})]

    def enter(self, name: str) -> None:
        """A branch begins."""
        self._open.append((name, [], {}))

    def leave(self) -> None:
        """It ends."""
        name, parts, arguments = self._open.pop()
        self._open[-1][1].append(Import(name, *parts, **arguments))

    def give(self, /, **arguments: object) -> None:
        """Arguments of the module that is open; None gives none."""
        given = {name: str(value) for name, value in arguments.items() if value is not None}
        self._open[-1][2].update(given)

    def call(self, name: str, traced: tuple[list[Import], dict[str, str]]) -> None:
        """Another prompt function ran."""
        parts, arguments = traced
        self._open[-1][1].append(Import(name, *parts, **arguments))

    def result(self) -> tuple[list[Import], dict[str, str]]:
        """The imports, and the arguments given outside all of them."""
        _, parts, arguments = self._open[0]
        return parts, arguments


def tracer(
    source: Source, branches: dict[int, str]
) -> Callable[..., tuple[list[Import], dict[str, str]]]:
    """A function of the same arguments that gives the prompt's imports and own arguments."""
    body = _Rewriter(source, branches).block(source.tree.body)
    tree = deepcopy(source.tree)
    tree.body, tree.decorator_list, tree.returns = body or [ast.Pass()], [], None
    spec = tree.args
    for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg):
        if arg is not None:
            arg.annotation = None
    # Defaults are the original's, bound before the call.
    spec.defaults = [ast.Constant(None) for _ in spec.defaults]
    spec.kw_defaults = [d and ast.Constant(None) for d in spec.kw_defaults]
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), source.file, "exec")
    signature = inspect.signature(source.function)

    def trace(*args: Any, **kwargs: Any) -> tuple[list[Import], dict[str, str]]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        events = Events()
        # Names are looked up now, as in any function: what it calls may be defined below it.
        scope = {**source.function.__globals__, **closed_over(source.function), _EVENTS: events}
        exec(code, scope)  # the user's own code, once more
        scope[tree.name](*bound.args, **bound.kwargs)
        return events.result()

    return trace


class _Rewriter:
    """Statements that branch as before and, instead of yielding, report."""

    def __init__(self, source: Source, branches: dict[int, str]) -> None:
        self._source, self._branches = source, branches

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for statement in body for new in self._statement(statement)]

    def _statement(self, node: ast.stmt) -> Iterator[ast.stmt]:
        if isinstance(node, ast.If):
            yield self._if(node)
        elif isinstance(node, ast.Match):
            cases = [
                ast.match_case(deepcopy(c.pattern), deepcopy(c.guard), self._arm(c.body))
                for c in node.cases
            ]
            yield ast.copy_location(ast.Match(deepcopy(node.subject), cases), node)
        elif isinstance(node, ast.With):
            yield from self.block(node.body)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
            yield self._call(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            yield from self._given(node.value)
        else:
            yield deepcopy(node)

    def _if(self, node: ast.If) -> ast.stmt:
        rest = node.orelse
        if len(rest) == 1 and isinstance(rest[0], ast.If):
            otherwise = [self._if(rest[0])]
        else:
            otherwise = self._arm(rest) if rest else []
        new = ast.If(deepcopy(node.test), self._arm(node.body), otherwise)
        return ast.copy_location(new, node)

    def _arm(self, body: list[ast.stmt]) -> list[ast.stmt]:
        name = ast.Constant(self._branches[id(body)])
        return [_report("enter", name), *self.block(body), _report("leave")]

    def _call(self, node: ast.YieldFrom) -> ast.stmt:
        call = deepcopy(node.value)
        assert isinstance(call, ast.Call)
        call.func = ast.Attribute(call.func, "trace", ast.Load())
        return _report("call", ast.Constant(self._branches[id(node)]), call)

    def _given(self, node: ast.Yield) -> Iterator[ast.stmt]:
        names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        for name in dict.fromkeys(names):
            if name in self._source.lengths:
                yield _report("give", **{name: ast.Name(name, ast.Load())})


def _report(event: str, *args: ast.expr, **keywords: ast.expr) -> ast.stmt:
    what = ast.Attribute(ast.Name(_EVENTS, ast.Load()), event, ast.Load())
    named = [ast.keyword(name, value) for name, value in keywords.items()]
    return ast.Expr(ast.Call(what, list(args), named))
