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


@dataclass(frozen=True)
class Module:
    """A named part that prompts import."""

    name: str
    path: Path
    children: tuple[Node, ...]
    where: Where


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports one at most; they begin at the same position.

    Attributes:
        stand_in: the child that stands there while later modules are encoded; None for nothing.
    """

    children: tuple[Module, ...]
    stand_in: str | None
    where: Where


@dataclass(frozen=True)
class Message:
    """A turn of a chat, for the model's own template."""

    role: str
    children: tuple[Node, ...]
    where: Where


@dataclass(frozen=True)
class Mark:
    """Where a message of a schema with messages in modules begins or ends.

    There, the chat template's markup is text of the module that says it.

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
        children: messages only, or no message at all; messages in modules are marks and what
            stands between them.
    """

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...]
    where: Where

    @property
    def messages(self) -> tuple[Message, ...]:
        """Its turns; empty for a schema that is no chat."""
        return tuple(child for child in self.children if isinstance(child, Message))

    @property
    def has_marks(self) -> bool:
        """Whether modules hold messages."""
        return any(isinstance(node, Mark) for node in walk(self.children))


def walk(children: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes in document order, parents first."""
    for child in children:
        yield child
        if not isinstance(child, Leaf):
            yield from walk(child.children)


def modules(children: tuple[Node, ...]) -> dict[str, Module]:
    """The modules of one scope by name: those not inside another module."""
    found: dict[str, Module] = {}
    for child in children:
        if isinstance(child, Module):
            found[child.name] = child
        elif isinstance(child, Union | Message):
            found |= modules(child.children)
    return found


def params(children: tuple[Node, ...]) -> dict[str, Param]:
    """The parameters of one scope by name."""
    found: dict[str, Param] = {}
    for child in children:
        if isinstance(child, Param):
            found[child.name] = child
        elif isinstance(child, Message):
            found |= params(child.children)
    return found
