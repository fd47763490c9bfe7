"""What a schema is made of. Knows no XML, no tokenizer and no model.

A text's white space is settled here already: see `parse.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

Path = tuple[str, ...]
ROLES = ("system", "user", "assistant")


class Where(NamedTuple):
    """A place in a file; lines and columns count from 1, and 0 means there is no such place."""

    line: int = 0
    column: int = 0


@dataclass(frozen=True)
class Text:
    """A run of text between tags.

    Attributes:
        number: of texts and parameters in the schema, in document order.
        text: verbatim, with the white space before it.
        unit: path of the module whose own text it is; empty for what every prompt contains.
        is_cached: its KV is kept.
    """

    number: int
    text: str
    unit: Path
    is_cached: bool = True


@dataclass(frozen=True)
class Param:
    """A place for an argument of at most `length` tokens.

    Attributes:
        lead: white space between what is before it and the argument.
        placeholder: what stands there while the module is encoded; empty for unknown tokens, or
            for empty positions where the vocabulary has none.
    """

    number: int
    name: str
    length: int
    lead: str
    placeholder: str
    unit: Path
    where: Where


@dataclass(frozen=True)
class Module:
    """A named part that prompts import.

    Attributes:
        union: number of the union that it is in; None for none.
    """

    name: str
    path: Path
    children: tuple[Node, ...]
    where: Where
    union: int | None = None


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports one at most; they begin at the same position.

    Attributes:
        stand_in: the child that stands there while later modules are encoded; None for nothing.
    """

    children: tuple[Module, ...]
    stand_in: str | None


@dataclass(frozen=True)
class Message:
    """A turn of a chat, for the model's own template.

    Attributes:
        children: the first and the last are its marks.
    """

    role: str
    children: tuple[Node, ...]


@dataclass(frozen=True)
class Mark:
    """Where a message begins or ends, and the chat template's markup stands.

    Attributes:
        number: as of a text; None for a message that a prompt adds.
        text: nothing; what stands there is for the model's template to say.
    """

    number: int | None
    role: str
    is_begin: bool
    unit: Path = ()
    is_cached: bool = True
    text: ClassVar[str] = ""


Leaf = Text | Param | Mark
Node = Leaf | Module | Union | Message


@dataclass(frozen=True)
class Scaffold:
    """Modules that are encoded together, for prompts that import all of them."""

    name: str
    paths: frozenset[Path]
    where: Where


@dataclass(frozen=True)
class SchemaNode:
    """A whole schema.

    Attributes:
        is_chat: it holds messages only, and the chat template is that of all of them; else the
            markup of messages in it is text of the modules that hold them.
    """

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...]
    is_chat: bool

    @property
    def messages(self) -> tuple[Message, ...]:
        """Its turns; empty for a schema that is no chat."""
        turns = self.children if self.is_chat else ()
        return tuple(child for child in turns if isinstance(child, Message))

    @property
    def has_messages(self) -> bool:
        """Whether there are any, in modules or out of them."""
        return any(isinstance(node, Message) for node in walk(self.children))


def walk(children: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes in document order, parents first."""
    for child in children:
        yield child
        if not isinstance(child, Leaf):
            yield from walk(child.children)


def scope(children: tuple[Node, ...]) -> Iterator[Module | Param]:
    """What a prompt can name in one scope, in document order: not what is in another module."""
    for child in children:
        if isinstance(child, Module | Param):
            yield child
        elif isinstance(child, Union | Message):
            yield from scope(child.children)


def modules(children: tuple[Node, ...]) -> dict[str, Module]:
    """The modules of one scope by name."""
    return {node.name: node for node in scope(children) if isinstance(node, Module)}


def params(children: tuple[Node, ...]) -> dict[str, Param]:
    """The parameters of one scope by name."""
    return {node.name: node for node in scope(children) if isinstance(node, Param)}
