"""From elements to a checked schema. Knows PML's grammar; knows no prompt and no tokenizer.

Sources: Prompt Cache, section 3.2 (both versions), and the authors' schema files, whose spellings
(`parameter`, `length`, `cache`, `scaffold` of unions and parameters) are understood too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element, check_attributes, nearest
from cached_rag.pml.nodes import (
    ROLES,
    Mark,
    Message,
    Module,
    Node,
    Param,
    Path,
    Scaffold,
    SchemaNode,
    Text,
    Union,
    Where,
    modules,
    walk,
)
from cached_rag.pml.whitespace import separator, split, wider

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_LENGTH = re.compile(r"0{0,9}[1-9][0-9]{0,6}")
_PARAM = ("param", "parameter")
RESERVED = frozenset(("schema", "prompt", "module", "union", "scaffold", *_PARAM, *ROLES))
_SPACE = "xml:space"


def parse_schema(root: Element, file: str | None = None) -> SchemaNode:
    """A schema from its element.

    Raises:
        PMLError: anything that is not as PML wants it, with its place.
    """
    return _Parser(file).schema(root)


class _Parser:
    """Walks elements in document order; remembers the white space that the next text begins with.

    `_separator` is None where a prompt or a message begins: no white space stands there.
    `_role` is that of the message it is in; empty outside of messages.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._count = 0
        self._separator: str | None = None
        self._role = ""

    def fail(self, what: str, where: Where) -> PMLError:
        return PMLError(what, where, self._file)

    def schema(self, root: Element) -> SchemaNode:
        if root.tag != "schema":
            hint = "; a prompt is checked with its schema" if root.tag == "prompt" else ""
            raise self.fail(f"a schema's root is <schema>, not <{root.tag}>{hint}", root.where)
        check_attributes(root, ("name", _SPACE), self._file)
        name = self._name(root)
        scaffolds = [e for e in root.content if isinstance(e, Element) and e.tag == "scaffold"]
        content = [e for e in root.content if isinstance(e, Chars) or e.tag != "scaffold"]
        tags = [e for e in content if isinstance(e, Element)]
        is_chat = any(e.tag in ROLES for e in tags) and not any(map(_holds_messages, tags))
        inside = Element("schema", root.attributes, root.where, content)
        keep = self._keeps_space(root, keep=False)
        children = tuple(
            self._turns(inside, keep=keep) if is_chat else self._nodes(inside, (), keep=keep)
        )
        self._check_names(children, root)
        known = modules(children)
        unions = [node for node in walk(children) if isinstance(node, Union)]
        union_of = {m.path: index for index, union in enumerate(unions) for m in union.children}
        found = tuple(self._scaffold(element, known, union_of) for element in scaffolds)
        self._check_unique([s.name for s in found], [s.where for s in found], "scaffold")
        return SchemaNode(name, children, found, root.where)

    def _turns(self, root: Element, *, keep: bool) -> Iterator[Message]:
        for part in root.content:
            if isinstance(part, Element) and part.tag in ROLES:
                yield Message(part.tag, tuple(self._said(part, (), keep=keep)), part.where)
            elif isinstance(part, Element) or part.text.strip():
                what = f"<{part.tag}>" if isinstance(part, Element) else "text"
                raise self.fail(
                    f"{what} beside messages: a schema with <system>, <user> or <assistant> holds "
                    "everything inside them, or has messages in its modules",
                    part.where,
                )

    def _nodes(
        self, parent: Element, unit: Path, *, keep: bool, is_cached: bool = True
    ) -> Iterator[Node]:
        for part in parent.content:
            if isinstance(part, Chars):
                if text := self._text(part, keep=keep):
                    yield Text(self._number(), text, unit, is_cached)
            elif part.tag in _PARAM:
                yield self._param(part, unit)
            elif part.tag == "module":
                yield self._module(part, unit, keep=keep, is_cached=is_cached)
            elif part.tag == "union":
                yield self._union(part, unit, keep=keep, is_cached=is_cached)
            elif part.tag in ROLES:
                begin = Mark(self._number(), part.tag, True, unit, is_cached)
                said = tuple(self._said(part, unit, keep=keep, is_cached=is_cached))
                end = Mark(self._number(), part.tag, False, unit, is_cached)
                yield from (begin, *said, end)
            elif part.tag == "scaffold":
                raise self.fail("a scaffold stands directly in <schema>", part.where)
            else:
                known = ("module", "union", *_PARAM, *ROLES)
                hint = nearest(part.tag, known)
                raise self.fail(f"a schema has no <{part.tag}>{hint}", part.where)

    def _said(
        self, message: Element, unit: Path, *, keep: bool, is_cached: bool = True
    ) -> Iterator[Node]:
        """What a message holds."""
        if self._role:
            raise self.fail(
                f"<{message.tag}> inside <{self._role}>: a message holds no other", message.where
            )
        check_attributes(message, (_SPACE,), self._file)
        self._role, self._separator = message.tag, None
        keep = self._keeps_space(message, keep=keep)
        yield from self._nodes(message, unit, keep=keep, is_cached=is_cached)
        self._role, self._separator = "", None

    def _text(self, chars: Chars, *, keep: bool) -> str:
        """A text with the white space before it; empty if it is white space alone."""
        if keep:
            before, self._separator = self._separator or "", ""
            return before + chars.text
        before, body, after = split(chars.text, is_code=chars.is_code)
        if not body:
            if self._separator is not None:
                self._separator = wider(self._separator, separator(before))
            return ""
        lead = "" if self._separator is None else wider(self._separator, separator(before))
        self._separator = separator(after)
        return lead + body

    def _param(self, element: Element, unit: Path) -> Param:
        check_attributes(element, ("name", "len", "length", "scaffold"), self._file)
        given = [element.attributes[n] for n in ("len", "length") if n in element.attributes]
        if len(given) != 1 or not _LENGTH.fullmatch(given[0]):
            raise self.fail(
                'a parameter needs one len="..." (or length): the most tokens of its argument, '
                "at least 1 and at most 9999999",
                element.where,
            )
        if any(isinstance(c, Element) or c.text.strip() for c in element.content):
            raise self.fail("a parameter is empty; prompts give its argument", element.where)
        lead, self._separator = self._separator or "", ""
        placeholder = element.attributes.get("scaffold", "")
        number = self._number()
        return Param(number, self._name(element), int(given[0]), lead, placeholder, unit)

    def _module(self, element: Element, unit: Path, *, keep: bool, is_cached: bool) -> Module:
        check_attributes(element, ("name", "cache", _SPACE), self._file)
        name, wanted = self._name(element), element.attributes.get("cache", "true")
        if wanted not in ("true", "false"):
            raise self.fail(f'cache is "true" or "false", not {wanted!r}', element.where)
        path, is_cached = (*unit, name), is_cached and wanted == "true"
        keep = self._keeps_space(element, keep=keep)
        children = tuple(self._nodes(element, path, keep=keep, is_cached=is_cached))
        self._check_names(children, element)
        return Module(name, path, children, element.where)

    def _union(self, element: Element, unit: Path, *, keep: bool, is_cached: bool) -> Union:
        check_attributes(element, ("scaffold", _SPACE), self._file)
        keep = self._keeps_space(element, keep=keep)
        edges = [] if keep else [element.content[i] for i in (0, -1) if element.content]
        spaces = [separator(e.text) if isinstance(e, Chars) else "" for e in edges]
        if spaces and self._separator is not None:
            self._separator = wider(self._separator, spaces[0])
        before, after = self._separator, spaces[-1] if spaces else ""
        children: list[Module] = []
        for part in element.content:
            if isinstance(part, Element) and part.tag == "module":
                self._separator = before
                children.append(self._module(part, unit, keep=keep, is_cached=is_cached))
                after = wider(after, self._separator or "")
            elif isinstance(part, Element) or part.text.strip():
                what = f"<{part.tag}>" if isinstance(part, Element) else "text"
                raise self.fail(f"{what} in a union, which holds modules only", part.where)
        if not children:
            raise self.fail("an empty union", element.where)
        self._separator = after
        stand_in = element.attributes.get("scaffold")
        names = [child.name for child in children]
        if stand_in is not None and stand_in not in names:
            hint = nearest(stand_in, names)
            raise self.fail(f"the union's scaffold {stand_in!r} is not in it{hint}", element.where)
        return Union(tuple(children), stand_in, element.where)

    def _scaffold(
        self, element: Element, known: dict[str, Module], union_of: dict[Path, int]
    ) -> Scaffold:
        check_attributes(element, ("name",), self._file)
        paths = frozenset(self._imported(element, known))
        if not paths:
            raise self.fail("a scaffold names the modules that it holds together", element.where)
        unions = [union_of[path] for path in paths if path in union_of]
        if len(unions) > len(set(unions)):
            raise self.fail("a scaffold of modules that exclude each other", element.where)
        return Scaffold(self._name(element), paths, element.where)

    def _imported(self, element: Element, known: dict[str, Module]) -> Iterator[Path]:
        for part in element.content:
            if isinstance(part, Chars):
                if part.text.strip():
                    raise self.fail("text in a scaffold, which names modules only", part.where)
                continue
            check_attributes(part, (), self._file)
            if part.tag not in known:
                hint = nearest(part.tag, known)
                raise self.fail(f"there is no module {part.tag!r} here{hint}", part.where)
            module = known[part.tag]
            yield module.path
            yield from self._imported(part, modules(module.children))

    def _check_names(self, children: tuple[Node, ...], scope: Element) -> None:
        every = list(_named(children))
        self._check_unique([n for n, _ in every], [w for _, w in every], "module")
        names = [child.name for child in _params(children)]
        self._check_unique(names, [scope.where] * len(names), "parameter")

    def _check_unique(self, names: list[str], places: list[Where], what: str) -> None:
        firsts: dict[str, Where] = {}
        for name, place in zip(names, places, strict=True):
            if name in firsts:
                raise self.fail(
                    f"{what} {name!r} is there twice in one scope "
                    f"(first in line {firsts[name].line})",
                    place,
                )
            firsts[name] = place

    def _name(self, element: Element) -> str:
        name = element.attributes.get("name", "")
        if not name:
            raise self.fail(f'<{element.tag}> needs a name="..."', element.where)
        if element.tag == "module" and (not _NAME.fullmatch(name) or name in RESERVED):
            raise self.fail(
                f"a module cannot be called {name!r}: prompts import it by a tag of that name, so "
                "it begins with a letter, has letters, digits, '.', '-', '_' only, and is none of "
                f"{', '.join(sorted(RESERVED))}",
                element.where,
            )
        return name

    def _keeps_space(self, element: Element, *, keep: bool) -> bool:
        wanted = element.attributes.get(_SPACE)
        if wanted not in (None, "preserve", "default"):
            raise self.fail('xml:space is "preserve" or "default"', element.where)
        return keep if wanted is None else wanted == "preserve"

    def _number(self) -> int:
        self._count += 1
        return self._count - 1


def _holds_messages(element: Element) -> bool:
    """Whether messages stand in a module, or in what is no message itself."""
    inside = [part for part in element.content if isinstance(part, Element)]
    return element.tag not in ROLES and any(
        part.tag in ROLES or _holds_messages(part) for part in inside
    )


def _named(children: tuple[Node, ...]) -> Iterator[tuple[str, Where]]:
    """Modules of one scope, in document order, twins included."""
    for child in children:
        if isinstance(child, Module):
            yield child.name, child.where
        elif isinstance(child, Union | Message):
            yield from _named(child.children)


def _params(children: tuple[Node, ...]) -> Iterator[Param]:
    """Parameters of one scope, twins included."""
    for child in children:
        if isinstance(child, Param):
            yield child
        elif isinstance(child, Message):
            yield from _params(child.children)
