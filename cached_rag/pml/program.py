"""A Python function as a prompt program: its schema, and what a call of it imports.

The schema is read off the function's syntax tree, so it has every branch: `if` becomes a module,
`if`/`elif`/`else` and `match` become unions, a call of another prompt function a nested module
(Prompt Cache, MLSys version, section 3.2.4).

For a call, the tree is rewritten. The texts are in the schema, so the rewritten statements do not
yield them. They yield which modules the call imports: a name where a module begins, None where it
ends, and a dictionary of arguments for the module that is open. Compiled again, it is run with the
call's arguments: so the function's own conditions decide which modules the prompt imports.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element, Where
from cached_rag.pml.nodes import ROLES
from cached_rag.pml.parse import RESERVED
from cached_rag.pml.prompt import Import

_KEEP_SPACE = {"xml:space": "preserve"}
_OTHERWISE = "otherwise"

Content = list[Element | Chars]
# What a statement may yield, as PML, and the statements that replace it.
Read = tuple[Content, list[ast.stmt]]
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
    where: Where
    content: Content
    events: Callable[..., Iterator[Event]]

    def element(self, tag: str, name: str, where: Where) -> Element:
        """The function as a <schema>, or as a <module> in a function that calls it."""
        return Element(tag, {"name": name, **_KEEP_SPACE}, where, self.content)

    def call(self, /, *args: Any, **kwargs: Any) -> Import:
        """What a call imports, as one import that stands for the whole schema.

        Raises:
            TypeError: the arguments are not the function's.
        """
        return _imported(self.name, self.events(*args, **kwargs))


def _imported(name: str, events: Iterator[Event]) -> Import:
    """The import of a module, from its events up to the one that ends it."""
    parts: list[Import] = []
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
        # An indented function is parsed inside a block: dedenting it would change its strings, too.
        is_inside = lines[0][:1].isspace()
        block: Any = ast.parse("".join(["if True:\n" if is_inside else "", *lines])).body[0]
    except (OSError, TypeError, SyntaxError) as error:  # a lambda's lines may be no statement
        raise PMLError(f"the source of {function!r} cannot be read: {error}") from error
    tree = block.body[0] if is_inside else block
    where = Where(first, 1, file)
    if not isinstance(tree, ast.FunctionDef) or hasattr(function, "__wrapped__"):
        raise PMLError("a prompt function is a plain `def`, decorated by nothing else", where)
    ast.increment_lineno(tree, first - 1 - is_inside)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise PMLError(
            f"an annotation names what the module does not have: {error}; write the number of "
            "MaxTokens out, or define it at the top of the module",
            where,
        ) from error
    lengths = {name: mark.length for name, hint in hints.items() for mark in _marks(hint)}
    code = function.__code__
    hidden = {*code.co_varnames, *code.co_cellvars}  # parameters, and what is assigned to
    scope = {name: value for name, value in _scope(function).items() if name not in hidden}
    content = Reader(file, lengths, scope).read(tree)
    return Program(tree.name, where, content, _compiled(function, tree, file))


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
    tree.body.append(_say(ast.Dict([], [])))  # makes it a generator, even without text
    tree.decorator_list = []
    # Defaults are the original's, set at each call.
    tree.args.defaults, tree.args.kw_defaults = [], [None for _ in tree.args.kwonlyargs]
    # Annotations are not evaluated, as `compile` takes that over from this file.
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), file, "exec")

    def events(*args: Any, **kwargs: Any) -> Iterator[Event]:
        # Globals are looked up at the call, as in any function: they may be defined below it.
        scope = _scope(function)
        exec(code, scope)  # the user's own code, rewritten
        rewritten = scope[tree.name]
        rewritten.__defaults__ = function.__defaults__
        rewritten.__kwdefaults__ = function.__kwdefaults__
        found: Iterator[Event] = rewritten(*args, **kwargs)
        return found

    return events


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

    def read(self, tree: ast.FunctionDef) -> Content:
        """The PML of the function; replaces its statements."""
        statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Yield | ast.YieldFrom) and node not in statements:
                raise self._fail("`yield` is a statement of its own here", node)
        return self._block(tree.body)

    def _block(self, body: list[ast.stmt]) -> Content:
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
        if isinstance(node, ast.If | ast.Match):
            return [self._branches(node)], [node]
        if isinstance(node, ast.With):
            return [self._message(node)], node.body
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Pass | ast.Assign | ast.AnnAssign):
            return [], [node]
        raise self._fail(
            f"a prompt function cannot use `{type(node).__name__.lower()}`: it yields text, "
            "branches by if and match, and yields from other prompt functions, so that all it may "
            "say is known before it runs",
            node,
        )

    # Text ------------------------------------------------------------------------------------

    def _text(self, node: ast.Yield) -> Read:
        value = node.value
        parts = value.values if isinstance(value, ast.JoinedStr) else [value]
        said = [self._part(part, node) for part in parts]
        names = [part.attributes["name"] for part in said if isinstance(part, Element)]
        keys: list[ast.expr | None] = [ast.Constant(name) for name in names]
        given = ast.Dict(keys, [ast.Name(name, ast.Load()) for name in names])
        return said, [_say(given)] if names else []

    def _part(self, part: ast.expr | None, node: ast.Yield) -> Element | Chars:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            return Chars(part.value, self._where(part))
        if isinstance(part, ast.Name):
            part = ast.FormattedValue(part, -1)
        if not isinstance(part, ast.FormattedValue):
            raise self._fail(
                "yield a string or an f-string; what changes goes into parameters marked with "
                "MaxTokens",
                node,
            )
        name = part.value.id if isinstance(part.value, ast.Name) else ""
        if name and (part.conversion != -1 or part.format_spec is not None):
            raise self._fail(f"{{{name}}} cannot be formatted in a prompt function", part)
        if name in self.lengths:
            length = str(self.lengths[name])
            return Element("param", {"name": name, "len": length}, self._where(part.value))
        constant = self.scope.get(name)
        if isinstance(constant, str):
            return Chars(constant, self._where(part.value))
        shown = ast.unparse(part.value)
        raise self._fail(
            f"{{{shown}}} is neither a parameter marked with MaxTokens nor a constant string; "
            f"write `{name or 'name'}: Annotated[str, MaxTokens(16)]` in the function's head",
            part.value,
        )

    # Branches --------------------------------------------------------------------------------

    def _branches(self, node: ast.If | ast.Match) -> Element:
        arms = [self._arm(shown, body) for shown, body in _arms(node)]
        if len(arms) == 1:
            return arms[0]
        return Element("union", _KEEP_SPACE, self._where(node), [*arms])

    def _arm(self, shown: str, body: list[ast.stmt]) -> Element:
        """One branch as a module; its rewritten statements yield the module's begin and end."""
        name, where = self._name(shown), self._where(body[0])
        outer, self._taken = self._taken, set()
        content = self._block(body)
        self._taken = outer
        body[:] = [_say(ast.Constant(name)), *body, _say(ast.Constant(None))]
        return Element("module", {"name": name, **_KEEP_SPACE}, where, content)

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
        return [program.element("module", name, self._where(node))], run

    def _message(self, node: ast.With) -> Element:
        role = _called(node.items[0].context_expr)
        if role not in ROLES or len(node.items) != 1:
            raise self._fail("`with` takes system(), user() or assistant() here", node)
        return Element(role, _KEEP_SPACE, self._where(node), self._block(node.body))

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

    def _where(self, node: ast.AST) -> Where:
        """The place of a syntax node in the function's file."""
        return Where(getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1, self.file)

    def _fail(self, what: str, node: ast.AST) -> PMLError:
        return PMLError(what, self._where(node))


def _arms(node: ast.If | ast.Match) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each branch's condition, as source text, and its statements."""
    if isinstance(node, ast.Match):
        for case in node.cases:
            guard = f" if {ast.unparse(case.guard)}" if case.guard is not None else ""
            shown = ast.unparse(case.pattern) + guard
            yield _OTHERWISE if shown == "_" else shown, case.body
        return
    yield ast.unparse(node.test), node.body
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        yield from _arms(node.orelse[0])
    elif node.orelse:
        yield _OTHERWISE, node.orelse


def _called(node: ast.expr) -> str:
    """The name of the function that is called; empty if `node` is no call by name."""
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if is_named else ""  # type: ignore[attr-defined]


def _say(what: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Yield(what))
