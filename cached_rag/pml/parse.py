"""From XML elements to a checked schema: PML's grammar. Knows no prompt and no tokenizer.

The grammar is that of Prompt Cache, section 3.2 (both versions of the paper). The spellings in the
authors' schema files (`parameter`, `length`, `cache`, `scaffold` of unions and parameters) are
accepted, too.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import cached_rag.pml.nodes as nodes
from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element, check_attributes, nearest, split, wider

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_LENGTH = re.compile(r"0{0,9}[1-9][0-9]{0,6}")
_PARAM = ("param", "parameter")
RESERVED = frozenset(("schema", "prompt", "module", "union", "scaffold", *_PARAM, *nodes.ROLES))
_SPACE = "xml:space"
_KINDS = {nodes.Module: "module", nodes.Param: "parameter", nodes.Scaffold: "scaffold"}


class _Around(NamedTuple):
    """What an element inherits from the elements around it.

    Attributes:
        unit: path of the module around it.
        is_cached: whether that module's KV is kept.
        keep: whether white space is kept as it is written.
        role: role of the message around it; empty outside of messages.
    """

    unit: nodes.Path = ()
    is_cached: bool = True
    keep: bool = False
    role: str = ""


def parse_schema(root: Element) -> nodes.SchemaNode:
    """A schema from its element.

    Raises:
        PMLError: the element is not a valid schema; the error names the place.
    """
    return _Parser().schema(root)


class _Parser:
    """Walks elements in document order.

    `_separator` is the white space that the next text begins with; None at the beginning of a
    prompt or message, where white space is dropped.
    """

    def __init__(self) -> None:
        self._count = 0
        self._separator: str | None = None

    def schema(self, root: Element) -> nodes.SchemaNode:
        if root.tag != "schema":
            hint = "; a prompt is checked with its schema" if root.tag == "prompt" else ""
            raise PMLError(f"a schema's root is <schema>, not <{root.tag}>{hint}", root.where)
        check_attributes(root, ("name", _SPACE))
        name = self._name(root)
        scaffolds = [e for e in root.content if isinstance(e, Element) and e.tag == "scaffold"]
        content = [e for e in root.content if isinstance(e, Chars) or e.tag != "scaffold"]
        tags = [e for e in content if isinstance(e, Element)]
        is_chat = any(e.tag in nodes.ROLES for e in tags) and not any(map(_holds_messages, tags))
        if is_chat:
            why = (
                "beside messages: a schema with <system>, <user> or <assistant> holds everything "
                "inside them, or has messages in its modules"
            )
            content = list(_only(nodes.ROLES, content, why))
        children = tuple(self._nodes(content, self._within(root, _Around())))
        self._check_unique(nodes.scope(children))
        known = nodes.modules(children)
        found = tuple(self._scaffold(element, known) for element in scaffolds)
        self._check_unique(found)
        return nodes.SchemaNode(name, children, found, is_chat)

    def _nodes(self, content: Sequence[Element | Chars], around: _Around) -> Iterator[nodes.Node]:
        for part in content:
            if isinstance(part, Chars):
                if text := self._text(part, keep=around.keep):
                    yield nodes.Text(self._number(), text, around.unit, around.is_cached)
            elif part.tag in _PARAM:
                yield self._param(part, around.unit)
            elif part.tag == "module":
                yield self._module(part, around)
            elif part.tag == "union":
                yield self._union(part, around)
            elif part.tag in nodes.ROLES:
                yield self._message(part, around)
            elif part.tag == "scaffold":
                raise PMLError("a scaffold stands directly in <schema>", part.where)
            else:
                known = ("module", "union", *_PARAM, *nodes.ROLES)
                hint = nearest(part.tag, known)
                raise PMLError(f"a schema has no <{part.tag}>{hint}", part.where)

    def _message(self, element: Element, around: _Around) -> nodes.Message:
        role = element.tag
        if around.role:
            raise PMLError(
                f"<{role}> inside <{around.role}>: a message holds no other", element.where
            )
        check_attributes(element, (_SPACE,))
        inside = self._within(element, around)._replace(role=role)
        begin = nodes.Mark(self._number(), role, True, around.unit, around.is_cached)
        self._separator = None
        said = tuple(self._nodes(element.content, inside))
        self._separator = None
        end = nodes.Mark(self._number(), role, False, around.unit, around.is_cached)
        return nodes.Message(role, (begin, *said, end))

    def _text(self, chars: Chars, *, keep: bool) -> str:
        """A text with the white space before it; empty if there is only white space."""
        if keep:
            before, self._separator = self._separator or "", ""
            return before + chars.text
        before, body, after = split(chars.text, is_code=chars.is_code)
        if not body:
            if self._separator is not None:
                self._separator = wider(self._separator, before)
            return ""
        lead = "" if self._separator is None else wider(self._separator, before)
        self._separator = after
        return lead + body

    def _param(self, element: Element, unit: nodes.Path) -> nodes.Param:
        check_attributes(element, ("name", "len", "length", "scaffold"))
        given = [element.attributes[n] for n in ("len", "length") if n in element.attributes]
        if len(given) != 1 or not _LENGTH.fullmatch(given[0]):
            raise PMLError(
                'a parameter needs one len="..." (or length): the most tokens of its argument, '
                "at least 1 and at most 9999999",
                element.where,
            )
        if any(isinstance(c, Element) or c.text.strip() for c in element.content):
            raise PMLError("a parameter is empty; prompts give its argument", element.where)
        lead, self._separator = self._separator or "", ""
        placeholder = element.attributes.get("scaffold", "")
        number = self._number()
        name = self._name(element)
        return nodes.Param(number, name, int(given[0]), lead, placeholder, unit, element.where)

    def _module(self, element: Element, around: _Around, union: int | None = None) -> nodes.Module:
        check_attributes(element, ("name", "cache", _SPACE))
        name, wanted = self._name(element), element.attributes.get("cache", "true")
        if wanted not in ("true", "false"):
            raise PMLError(f'cache is "true" or "false", not {wanted!r}', element.where)
        path, is_cached = (*around.unit, name), around.is_cached and wanted == "true"
        inside = self._within(element, around)._replace(unit=path, is_cached=is_cached)
        children = tuple(self._nodes(element.content, inside))
        self._check_unique(nodes.scope(children))
        return nodes.Module(name, path, children, element.where, union)

    def _union(self, element: Element, around: _Around) -> nodes.Union:
        check_attributes(element, ("scaffold", _SPACE))
        inside, number = self._within(element, around), self._number()
        edges = [] if inside.keep else [element.content[i] for i in (0, -1) if element.content]
        spaces = [split(e.text)[0] if isinstance(e, Chars) else "" for e in edges]
        if spaces and self._separator is not None:
            self._separator = wider(self._separator, spaces[0])
        before, after = self._separator, spaces[-1] if spaces else ""
        children: list[nodes.Module] = []
        for part in _only(("module",), element.content, "in a union, which holds modules only"):
            self._separator = before
            children.append(self._module(part, inside, number))
            after = wider(after, self._separator or "")
        if not children:
            raise PMLError("an empty union", element.where)
        self._separator = after
        stand_in = element.attributes.get("scaffold")
        names = [child.name for child in children]
        if stand_in is not None and stand_in not in names:
            hint = nearest(stand_in, names)
            raise PMLError(f"the union's scaffold {stand_in!r} is not in it{hint}", element.where)
        return nodes.Union(tuple(children), stand_in)

    def _scaffold(self, element: Element, known: dict[str, nodes.Module]) -> nodes.Scaffold:
        check_attributes(element, ("name",))
        named = {module.path: module for module in self._imported(element, known)}
        if not named:
            raise PMLError("a scaffold names the modules that it holds together", element.where)
        unions = [module.union for module in named.values() if module.union is not None]
        if len(unions) > len(set(unions)):
            raise PMLError("a scaffold of modules that exclude each other", element.where)
        return nodes.Scaffold(self._name(element), frozenset(named), element.where)

    def _imported(self, element: Element, known: dict[str, nodes.Module]) -> Iterator[nodes.Module]:
        for part in element.content:
            if isinstance(part, Chars):
                if part.text.strip():
                    raise PMLError("text in a scaffold, which names modules only", part.where)
                continue
            check_attributes(part, ())
            if part.tag not in known:
                hint = nearest(part.tag, known)
                raise PMLError(f"there is no module {part.tag!r} here{hint}", part.where)
            module = known[part.tag]
            yield module
            yield from self._imported(part, nodes.modules(module.children))

    def _check_unique(self, named: Iterable[nodes.Module | nodes.Param | nodes.Scaffold]) -> None:
        firsts: dict[tuple[str, str], nodes.Module | nodes.Param | nodes.Scaffold] = {}
        for node in named:
            what = _KINDS[type(node)]
            first = firsts.setdefault((what, node.name), node)
            if first is not node:
                raise PMLError(
                    f"{what} {node.name!r} is there twice in one scope "
                    f"(first in line {first.where.line})",
                    node.where,
                )

    def _name(self, element: Element) -> str:
        name = element.attributes.get("name", "")
        if not name:
            raise PMLError(f'<{element.tag}> needs a name="..."', element.where)
        if element.tag == "module" and (not _NAME.fullmatch(name) or name in RESERVED):
            raise PMLError(
                f"a module cannot be called {name!r}: prompts import it by a tag of that name, so "
                "it begins with a letter, has letters, digits, '.', '-', '_' only, and is none of "
                f"{', '.join(sorted(RESERVED))}",
                element.where,
            )
        return name

    def _within(self, element: Element, around: _Around) -> _Around:
        """What an element's content inherits, with the element's own xml:space."""
        wanted = element.attributes.get(_SPACE)
        if wanted not in (None, "preserve", "default"):
            raise PMLError('xml:space is "preserve" or "default"', element.where)
        return around if wanted is None else around._replace(keep=wanted == "preserve")

    def _number(self) -> int:
        self._count += 1
        return self._count - 1


def _only(tags: Sequence[str], content: Sequence[Element | Chars], why: str) -> Iterator[Element]:
    """The content's elements, if it has none but these, and no text."""
    for part in content:
        if isinstance(part, Element) and part.tag in tags:
            yield part
        elif isinstance(part, Element) or part.text.strip():
            what = f"<{part.tag}>" if isinstance(part, Element) else "text"
            raise PMLError(f"{what} {why}", part.where)


def _holds_messages(element: Element) -> bool:
    """Whether an element that is no message itself contains messages."""
    inside = [part for part in element.content if isinstance(part, Element)]
    return element.tag not in nodes.ROLES and any(
        part.tag in nodes.ROLES or _holds_messages(part) for part in inside
    )
