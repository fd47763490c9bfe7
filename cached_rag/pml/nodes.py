"""The nodes of a schema's tree. Knows no tokenizer and no model.

White space in the texts is final; `parse.py` has settled it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cached_rag.pml.markup import Where

Path = tuple[str, ...]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Text:
    """A run of text between tags.

    Attributes:
        number: a count of the schema's texts, parameters, marks and unions in document order.
        text: the text with the white space before it.
        unit: path of the module that contains it directly; empty for text in every prompt.
        is_cached: whether its KV is kept.
    """

    number: int
    text: str
    unit: Path
    is_cached: bool = True


@dataclass(frozen=True)
class Param:
    """A place for an argument of at most `length` tokens.

    Attributes:
        lead: white space before the argument.
        placeholder: text in the argument's place while the module is encoded. If empty, unknown
            tokens stand there, or nothing if the vocabulary has no unknown token.
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
        union: number of the union that contains it; None for none.
    """

    name: str
    path: Path
    children: tuple[Node, ...]
    where: Where
    union: int | None = None

    @property
    def has_params(self) -> bool:
        """Whether prompts give arguments to it, or to a module in it."""
        return any(isinstance(node, Param) for node in walk(self.children))


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports at most one; all begin at the same position.

    Attributes:
        stand_in: name of the module that stands there while later modules are encoded; None for
            none.
    """

    children: tuple[Module, ...]
    stand_in: str | None


@dataclass(frozen=True)
class Message:
    """A message of a chat, to be framed by the model's chat template.

    Attributes:
        children: the first and the last are the message's marks.
    """

    role: str
    children: tuple[Node, ...]


@dataclass(frozen=True)
class Mark:
    """The beginning or end of a message, where the chat template's markup is put.

    Attributes:
        number: as in `Text`; None for a message that a prompt adds.
        text: empty, since the markup depends on the model.
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
        is_chat: the schema consists of messages only, framed by one chat template. Otherwise
            messages may stand in modules, whose text then includes the template's markup.
    """

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...]
    is_chat: bool

    @property
    def has_messages(self) -> bool:
        """Whether the schema has any message, inside or outside of modules."""
        return any(isinstance(node, Message) for node in walk(self.children))


def walk(children: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes in document order, parents first."""
    for child in children:
        yield child
        if not isinstance(child, Leaf):
            yield from walk(child.children)


def scope(children: tuple[Node, ...]) -> Iterator[Module | Param]:
    """The modules and parameters that a prompt can name here, without those inside modules."""
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
