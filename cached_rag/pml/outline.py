"""A schema's tree with token counts and positions, to be printed or written as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.pml.layout import ModuleRun, SchemaLayout, lay_out
from cached_rag.pml.nodes import Leaf, Mark, Message, Module, Node, Param, Text, Union
from cached_rag.pml.schema import Schema

_SHOWN = 40


@dataclass(frozen=True)
class Outline:
    """A node of the tree.

    Attributes:
        kind: schema, system, user, assistant, module, union, param, text or template.
        label: its name, or the beginning of its text.
        tokens: number of its tokens; for a union, those of its longest module.
        start, end: its positions in the "schema" layout, end exclusive.
    """

    kind: str
    label: str
    tokens: int
    start: int
    end: int
    children: tuple[Outline, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        return asdict(self)


def outline(schema: Schema, tokenization: Tokenization) -> Outline:
    """The tree of a whole schema, with the chat template's tokens.

    Raises:
        ConfigError: the model's chat template does not admit the schema's messages.
    """
    drawn = _Drawn(lay_out(schema.node, tokenization), tokenization)
    return drawn.schema(schema)


@dataclass(frozen=True)
class _Drawn:
    layout: SchemaLayout
    tokenization: Tokenization

    def schema(self, schema: Schema) -> Outline:
        layout = self.layout
        around = [layout.begin] if layout.begin else layout.frames[-1:]
        ends = [self._template(run) for run in around if run.length]
        found = [self._node(child) for child in self._shown(schema.node.children)]
        children = [*ends, *found] if layout.begin else [*found, *ends]
        return Outline("schema", schema.name, layout.size, 0, layout.size, tuple(children))

    def _shown(self, children: Sequence[Node]) -> Iterator[Node]:
        """The nodes, without marks for which the template has no text."""
        for child in children:
            if not isinstance(child, Mark) or self._run(child).length:
                yield child

    def _run(self, leaf: Leaf) -> ModuleRun:
        assert leaf.number is not None
        return self.layout.texts[leaf.number]

    def _template(self, run: ModuleRun) -> Outline:
        text = self.tokenization.tokenizer.decode(run.ids)
        return Outline("template", _short(text), run.length, run.start, run.end)

    def _node(self, node: Node) -> Outline:
        if isinstance(node, Mark):
            return self._template(self._run(node))
        if isinstance(node, Text):
            run = self._run(node)
            return Outline("text", _short(node.text), run.length, run.start, run.end)
        if isinstance(node, Param):
            run = self._run(node)
            return Outline("param", f"{node.name} (at most {node.length})", 0, run.start, run.end)
        children = tuple(self._node(child) for child in self._shown(node.children))
        taken = [child for child in children if child.end > child.start]  # modules may be empty
        start = min((child.start for child in taken), default=0)
        end = max((child.end for child in taken), default=start)
        sizes = [child.tokens for child in children]
        if isinstance(node, Union):
            return Outline("union", "", max(sizes), start, end, children)
        kind = node.role if isinstance(node, Message) else "module"
        label = node.name if isinstance(node, Module) else ""
        return Outline(kind, label, sum(sizes), start, end, children)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
