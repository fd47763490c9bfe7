"""A prompt of a schema: the modules it imports, with which arguments, and the text it adds.

`parse_prompt` reads its parts from XML; `select` checks them against the schema and joins both to
one sequence of texts. Knows no tokenizer and no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import cached_rag.pml.nodes as nodes
from cached_rag.errors import PMLError
from cached_rag.pml.markup import NOWHERE, Chars, Element, Where, check_attributes, nearest, split


@dataclass(frozen=True)
class Import:
    """A module that a prompt takes from its schema; a whole prompt is an import of the schema.

    Attributes:
        parts: imports of modules inside it, and new text between them; in a prompt also messages.
        arguments: arguments of its parameters, by name.
    """

    name: str
    parts: tuple[Part, ...]
    arguments: Mapping[str, str]
    where: Where

    def __init__(self, name: str, /, *parts: Part, **arguments: object) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parts", parts)
        given = {name: str(value) for name, value in arguments.items() if value is not None}
        object.__setattr__(self, "arguments", given)
        object.__setattr__(self, "where", NOWHERE)

    def at(self, where: Where) -> Import:
        """The same import with its place, which errors name."""
        object.__setattr__(self, "where", where)
        return self


@dataclass(frozen=True)
class Said:
    """A new message after the schema's own."""

    role: str
    text: str
    where: Where = NOWHERE


Part = Import | Said | str


@dataclass(frozen=True)
class Argument:
    """An argument in its parameter's place, with the white space before it."""

    param: nodes.Param
    text: str
    where: Where


@dataclass(frozen=True)
class New:
    """Text that the schema does not have."""

    text: str


Bit = nodes.Text | nodes.Mark | Argument | New


def new_text(bits: Sequence[Bit]) -> str:
    """A prompt's arguments and new text, which are not the schema's."""
    return "".join(bit.text for bit in bits if isinstance(bit, New | Argument))


def messages(bits: Sequence[Bit]) -> list[tuple[str, str]]:
    """(role, text) of each message; text outside of all messages is the user's."""
    found = [("", "")]
    for bit in bits:
        if isinstance(bit, nodes.Mark):
            found.append((bit.role if bit.is_begin else "", ""))
        else:
            role, text = found[-1]
            found[-1] = (role, text + bit.text)
    return [(role or "user", text) for role, text in found if role or text]


@dataclass
class _Choice:
    """What a prompt imports and adds, collected by `read` from its parts.

    Attributes:
        imports: by the module's path, which is empty for the prompt itself.
        of_unions: the name of the module imported from each union, by the union's number.
        before, after: new text before or after a module, by its path; or at the end of all.
        said: new messages.
    """

    imports: dict[nodes.Path, Import] = field(default_factory=dict)
    of_unions: dict[int, str] = field(default_factory=dict)
    before: dict[nodes.Path, list[str]] = field(default_factory=lambda: defaultdict(list))
    after: dict[nodes.Path, list[str]] = field(default_factory=lambda: defaultdict(list))
    said: list[Said] = field(default_factory=list)

    def read(self, asked: Import, children: tuple[nodes.Node, ...], scope: nodes.Path = ()) -> None:
        """Collect what is imported of the schema, or of the module at path `scope`."""
        self._check_arguments(asked, children, repr(asked.name) if scope else "the schema itself")
        self.imports[scope] = asked
        known = nodes.modules(children)
        last: nodes.Path | None = None
        added: list[str] = []  # since the last import
        for part in asked.parts:
            self._check(part)
            if isinstance(part, Said):
                self._say(part, scope)
            elif self.said:
                what, where = (part, NOWHERE) if isinstance(part, str) else (part.name, part.where)
                raise PMLError(f"{what!r} stands behind a message; put it before", where)
            elif isinstance(part, str):
                added.append(part)
            else:
                module = self._module(part, known, scope)
                place = self.before[module.path] if last is None else self.after[last]
                place += added
                added, last = [], module.path
                self.read(part, module.children, module.path)
        self.after[last if scope and last else scope] += added

    def _check(self, part: object) -> None:
        match part:
            case str() | Import(name=str()) | Said(role=str(), text=str()):
                return
        what = f"a prompt is of strings, Import(name, ...) and Said(role, text), not of {part!r}"
        raise PMLError(what, NOWHERE)

    def _say(self, part: Said, scope: nodes.Path) -> None:
        if scope:
            raise PMLError(f"<{part.role}> inside a module: messages stand at the end", part.where)
        if part.role not in nodes.ROLES:
            hint = nearest(part.role, nodes.ROLES)
            raise PMLError(f"there is no role {part.role!r}{hint}", part.where)
        self.said.append(part)

    def _module(
        self, part: Import, known: dict[str, nodes.Module], scope: nodes.Path
    ) -> nodes.Module:
        if part.name not in known:
            inside = f"in {'/'.join(scope)!r}" if scope else "in the schema"
            hint = nearest(part.name, known)
            raise PMLError(f"there is no module {part.name!r} {inside}{hint}", part.where)
        module = known[part.name]
        if module.path in self.imports:
            raise PMLError(f"{part.name!r} is imported twice", part.where)
        if module.union is not None:
            first = self.of_unions.setdefault(module.union, module.name)
            if first != module.name:
                raise PMLError(
                    f"{first!r} and {module.name!r} exclude each other: a prompt takes one module "
                    "of a union",
                    part.where,
                )
        return module

    def _check_arguments(self, part: Import, children: tuple[nodes.Node, ...], named: str) -> None:
        """Refuse arguments for which there is no parameter among the children."""
        own = nodes.params(children)
        for name in part.arguments.keys() - own.keys():
            hint = nearest(name, own)
            raise PMLError(f"{named} has no parameter {name!r}{hint}", part.where)


def select(schema: nodes.SchemaNode, prompt: Import) -> tuple[Bit, ...]:
    """All of a prompt in order: the schema's texts that it has, arguments and new text.

    New text stands after the import before it, or before the first import. New text after the last
    import stands at the end of the schema; in a chat, it goes into a message of the user.

    Raises:
        PMLError: the prompt imports or sets what the schema does not have, or imports two modules
            of a union; or one of the parts is none.
    """
    choice = _Choice()
    choice.read(prompt, schema.children)
    if choice.said and not schema.has_messages:
        raise PMLError(
            f"<{choice.said[0].role}> in a prompt whose schema has no messages; put the text "
            "in without a tag",
            choice.said[0].where,
        )
    bits = list(_bits(schema.children, choice))
    if added := choice.after[()]:
        _add(bits, added, schema)
    bits += [bit for said in choice.said for bit in _framed(said.role, [said.text])]
    return _spaced(bits)


def _add(bits: list[Bit], texts: Sequence[str], schema: nodes.SchemaNode) -> None:
    """Put new text at the end."""
    last = bits[-1] if bits else None
    mark = last if isinstance(last, nodes.Mark) else None
    if mark is None and (last or not schema.has_messages):
        bits += map(New, texts)
    elif mark and schema.is_chat and mark.role == "user":
        bits[-1:] = [*map(New, texts), mark]
    else:
        bits += _framed("user", texts)


def _framed(role: str, texts: Sequence[str]) -> list[Bit]:
    """A new message as bits."""
    return [nodes.Mark(None, role, True), *map(New, texts), nodes.Mark(None, role, False)]


def _bits(children: tuple[nodes.Node, ...], choice: _Choice) -> Iterator[Bit]:
    for child in children:
        if isinstance(child, nodes.Text | nodes.Mark):
            yield child
        elif isinstance(child, nodes.Param):
            given = choice.imports[child.unit]
            if value := given.arguments.get(child.name):
                yield Argument(child, child.lead + value, given.where)
        elif isinstance(child, nodes.Union | nodes.Message):
            yield from _bits(child.children, choice)
        elif child.path in choice.imports:
            yield from map(New, choice.before[child.path])
            yield from _bits(child.children, choice)
            yield from map(New, choice.after[child.path])


def _spaced(bits: Sequence[Bit]) -> tuple[Bit, ...]:
    """The bits, with a line break before new text that does not begin with white space."""
    spaced: list[Bit] = []
    for bit in bits:
        if isinstance(bit, New):
            is_first = not spaced or isinstance(spaced[-1], nodes.Mark)
            text = bit.text.lstrip() if is_first else bit.text
            bit = New(text if is_first or text[:1].isspace() else "\n" + text)
        spaced.append(bit)
    return tuple(spaced)


def parse_prompt(root: Element, schema: str) -> Import:
    """What a <prompt> element imports of the schema of this name.

    Raises:
        PMLError: the element is no prompt, or one of another schema.
    """
    if root.tag != "prompt":
        raise PMLError(f"a prompt's root is <prompt>, not <{root.tag}>", root.where)
    arguments = dict(root.attributes)
    wanted = arguments.pop("schema", schema)
    if wanted != schema:
        raise PMLError(f"this prompt is of schema {wanted!r}, and this is {schema!r}", root.where)
    return Import(schema, *_parts(root), **arguments).at(root.where)


def _parts(element: Element) -> Iterator[Part]:
    said: Element | None = None
    for part in element.content:
        if isinstance(part, Chars):
            text = _text(part)
            if text and said:
                raise PMLError(f"text behind <{said.tag}>: put it inside, or before", part.where)
            if text:
                yield text
        elif part.tag in nodes.ROLES:
            check_attributes(part, ())
            said = part
            inside = [c for c in part.content if isinstance(c, Element)]
            if inside:
                raise PMLError(
                    f"<{inside[0].tag}> inside <{part.tag}>: a prompt's own messages hold text "
                    "only; imports stand before them",
                    inside[0].where,
                )
            text = "".join(_text(c) for c in part.content if isinstance(c, Chars))
            yield Said(part.tag, text.lstrip(), part.where)
        else:
            yield Import(part.tag, *_parts(part), **part.attributes).at(part.where)


def _text(chars: Chars) -> str:
    before, body, _ = split(chars.text, is_code=chars.is_code)
    return before + body if body else ""
