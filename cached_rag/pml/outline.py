"""A schema's tree with its tokens and positions, for people and for JSON. Knows layouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.pml.layout import Layout, lay_out
from cached_rag.pml.nodes import Mark, Message, Module, Node, Param, Text, Union
from cached_rag.pml.schema import Schema

_SHOWN = 40


@dataclass(frozen=True)
class Outline:
    """A node of the tree.

    Attributes:
        kind: schema, system, user, assistant, module, union, param, text or template.
        label: its name, or how its text begins.
        tokens: that it adds to a prompt that has all of it; of a union, its longest child's.
        start, end: its positions in the schema's own layout, end exclusive.
    """

    kind: str
    label: str
    tokens: int
    start: int
    end: int
    children: tuple[Outline, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def outline(schema: Schema, tokenization: Tokenization) -> Outline:
    """The whole schema, its chat template's tokens included.

    Raises:
        ConfigError: the model's chat template does not admit the schema's messages.
    """
    layout = lay_out(schema.node, tokenization)
    children: list[Outline] = []
    if layout.begin is not None and layout.begin.length:
        children.append(_template(tokenization, layout, -1))
    for index, child in enumerate(schema.node.children):
        if schema.node.messages and layout.frames[index].length:
            children.append(_template(tokenization, layout, index))
        children.append(_outline(child, layout))
    if layout.frames and layout.frames[-1].length:
        children.append(_template(tokenization, layout, len(layout.frames) - 1))
    return Outline("schema", schema.name, layout.size, 0, layout.size, tuple(children))


def _template(tokenization: Tokenization, layout: Layout, index: int) -> Outline:
    run = layout.begin if index < 0 else layout.frames[index]
    assert run is not None
    text = tokenization.tokenizer.decode(run.ids)
    return Outline("template", _short(text), run.length, run.start, run.end)


def _outline(node: Node, layout: Layout) -> Outline:
    if isinstance(node, Text):
        run = layout.texts[node.number]
        return Outline("text", _short(node.text), run.length, run.start, run.end)
    if isinstance(node, Mark):
        assert node.number is not None
        run = layout.texts[node.number]
        label = f"begin of {node.role}" if node.is_begin else f"end of {node.role}"
        return Outline("template", label, run.length, run.start, run.end)
    if isinstance(node, Param):
        run = layout.texts[node.number]
        return Outline("param", f"{node.name} (at most {node.length})", 0, run.start, run.end)
    children = tuple(_outline(child, layout) for child in node.children)
    taken = [child for child in children if child.end > child.start]  # modules may be empty
    start = min((child.start for child in taken), default=0)
    end = max((child.end for child in taken), default=start)
    sizes = [child.tokens for child in children]
    if isinstance(node, Union):
        return Outline("union", "", max(sizes), start, end, children)
    name = node.role if isinstance(node, Message) else "module"
    label = node.name if isinstance(node, Module) else ""
    return Outline(name, label, sum(sizes), start, end, children)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
