"""`Schema`, a set of reusable prompt modules (Prompt Cache), its outline, and prompts of it.

These are the classes that users see. `planner.py` lays out and encodes a schema on an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.engine import Engine
from cached_rag.engine.planner import Planner
from cached_rag.errors import ConfigError, PMLError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import EncodeSummary
from cached_rag.pml.layout import ModuleRun, SchemaLayout, lay_out
from cached_rag.pml.markup import NOWHERE, Where, parse_markup
from cached_rag.pml.nodes import Leaf, Mark, Message, Module, Node, Param, SchemaNode, Text, Union
from cached_rag.pml.parse import parse_schema
from cached_rag.pml.planner import PromptPlanner, SchemaPlanner, planner_of
from cached_rag.pml.program import Program, read_function
from cached_rag.pml.prompt import Argument, Bit, New, Part, Said, messages, parse_prompt, select
from cached_rag.pml.units import BEHIND

# Prompts that were handed to a framework as plain text, by that text, so that the LLM at its other
# end finds the prompt again (`SchemaPrompt.sent`, `receive`). So many characters of new text are
# remembered in all, and each prompt counts as that many more.
_REMEMBERED, _EACH = 1 << 24, 1 << 10
_SENT: LRUCache[str, SchemaPrompt] = LRUCache(_REMEMBERED, lambda prompt: prompt.num_new + _EACH)
_SENDING = threading.Lock()
LAYOUTS = ("auto", "compact", "schema")
# Characters of a text that an outline shows.
_SHOWN = 40


@dataclass(frozen=True, eq=False)
class Schema:
    """Named modules, parameters and unions, from which prompts are made.

    Attributes:
        node: the schema's tree.
        source: the text that it was parsed from; for a function, a digest of what it may yield.
        layout: "schema" gives a module the positions it has in the schema, with gaps for what a
            prompt leaves out (as in the paper); "compact" leaves no gaps; "auto" is "compact" if
            the model's keys can be moved, else "schema".
        behind: the text before a module while it is encoded: "nothing" (as in the paper), the
            schema's "head" before all modules, or all text of the "schema" before the module that
            every prompt has.
    """

    node: SchemaNode
    source: str
    layout: str = "auto"
    behind: str = "schema"

    def __post_init__(self) -> None:
        for name, known in (("layout", LAYOUTS), ("behind", BEHIND)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}"
                )

    @classmethod
    def from_string(
        cls, source: str, *, layout: str = "auto", behind: str = "schema", file: str | None = None
    ) -> Schema:
        """Parse a <schema>.

        Raises:
            PMLError: it is not valid; the error names line, column and the likely remedy.
        """
        return cls(parse_schema(parse_markup(source, file)), source, layout, behind)

    @classmethod
    def from_file(cls, path: str | Path, *, layout: str = "auto", behind: str = "schema") -> Schema:
        """As `from_string`, from a UTF-8 file.

        Raises:
            PMLError: it cannot be read, or is not valid.
        """
        source = _read_source(path)
        return cls.from_string(source, layout=layout, behind=behind, file=str(path))

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], *, layout: str | None = None, behind: str | None = None
    ) -> Schema:
        """The schema of all that a function may yield; see `prompt_function`.

        Args:
            layout, behind: None for those of the function's decorator, or for the defaults if it
                has none.

        Raises:
            PMLError: it does what a schema cannot express; the error names file and line.
        """
        found = getattr(function, "schema", None)
        if not isinstance(found, Schema):
            found = cls.from_program(read_function(function))
        return replace(found, layout=layout or found.layout, behind=behind or found.behind)

    @classmethod
    def from_program(cls, program: Program, layout: str = "auto", behind: str = "schema") -> Schema:
        """As `from_function`, of one that was read."""
        node = parse_schema(program.element("schema", program.name, program.where))
        return cls(node, digest(repr(node)), layout, behind)

    @property
    def name(self) -> str:
        """The schema's name, by which prompts refer to it."""
        return self.node.name

    @property
    def digest(self) -> str:
        """Equal for schemas with the same source, layout and encoding."""
        return digest(self.source, self.layout, self.behind)

    def outline(self, tokenization: Tokenization) -> Outline:
        """The tree with token counts and positions, also of the chat template's tokens.

        Raises:
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        return _Drawn(lay_out(self.node, tokenization), tokenization).schema(self.node)

    def prompt(self, /, *parts: Part, **arguments: str) -> SchemaPrompt:
        """Make a prompt of imports, new text between and after them, and new messages at the end.

        Args:
            parts: `Import`s, strings and `Said`s. Strings are never parsed as PML.
            arguments: arguments of the schema's parameters outside all modules.

        Raises:
            PMLError: it imports or sets what the schema does not have; or one of the parts is none.
        """
        return SchemaPrompt(self, parts, arguments)

    def prompt_from_string(self, source: str, *, file: str | None = None) -> SchemaPrompt:
        """Parse a <prompt>.

        Raises:
            PMLError: it is not valid, or of another schema.
        """
        root = parse_markup(source, file)
        parts, arguments = parse_prompt(root)
        wanted = root.attributes.get("schema", self.name)
        if wanted != self.name:
            what = f"this prompt is of schema {wanted!r}, and this is {self.name!r}"
            raise PMLError(what, root.where)
        return SchemaPrompt(self, tuple(parts), arguments, root.where)

    def prompt_from_file(self, path: str | Path) -> SchemaPrompt:
        """As `prompt_from_string`, from a UTF-8 file."""
        return self.prompt_from_string(_read_source(path), file=str(path))

    def encode(
        self, engine: Engine, progress: Callable[[str], object] = lambda _: None
    ) -> EncodeSummary:
        """Prefill all modules now; otherwise each is prefilled when a prompt first needs it.

        Args:
            progress: called with each module's name once its KV is kept.

        Raises:
            ContextOverflowError: a module reaches beyond the model's context.
            RelocationError: a module reaches positions at which the model's frequencies change.
            StoreFullError: the store is full; what was encoded before is kept.
        """
        return self.planner(engine).encode(progress)

    def missing(self, engine: Engine) -> list[str]:
        """Names of the modules that `encode` would prefill; "" for text that every prompt has."""
        return [unit.name for unit in self.planner(engine).missing()]

    def planner(self, engine: Engine) -> SchemaPlanner:
        """The planner of all the schema's prompts on an engine; made once.

        Raises:
            ClosedError: the engine was closed.
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        return planner_of(
            self.node, engine, key=self.digest, layout=self.layout, behind=self.behind
        )


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt derived from a schema, for `Engine.generate`.

    Attributes:
        parts, arguments: as in `Schema.prompt`.
        where: the place at which it was read, for errors.
        bits: the whole prompt in order, see `select`.

    Raises:
        PMLError: it imports or sets what the schema does not have.
    """

    schema: Schema
    parts: tuple[Part, ...]
    arguments: Mapping[str, str]
    where: Where = NOWHERE
    bits: tuple[Bit, ...] = field(init=False)

    def __post_init__(self) -> None:
        bits = select(self.schema.node, self.parts, self.arguments, self.where)
        object.__setattr__(self, "bits", bits)

    def then(self, *parts: str | Said) -> SchemaPrompt:
        """The prompt with text or messages added at its end."""
        return replace(self, parts=(*self.parts, *parts))

    @property
    def num_new(self) -> int:
        """How many characters it has that its schema does not."""
        return sum(len(bit.text) for bit in self.bits if isinstance(bit, New | Argument))

    def plain(self) -> str | list[dict[str, str]]:
        """The prompt without PML, for any model: a string, or chat messages."""
        if not self.schema.node.has_messages:
            return "".join(bit.text for bit in self.bits)
        return [{"role": role, "content": text} for role, text in messages(self.bits)]

    def planner(self, engine: Engine) -> Planner:
        """The prompt's planner on an engine, which calls this; see `engine.engine.Planned`."""
        return PromptPlanner(self.schema.planner(engine), self.bits)

    def count_tokens(self, engine: Engine) -> int:
        """The number of the prompt's tokens, with an engine's tokenizer."""
        return self.schema.planner(engine).count_tokens(self.bits)

    def sent(self) -> str | list[dict[str, str]]:
        """As `plain`; remembers the prompt, so that `receive` finds it by the plain text."""
        plain = self.plain()
        if self.num_new + _EACH <= _REMEMBERED:
            with _SENDING:
                _SENT[_key(plain)] = self
        return plain

    @staticmethod
    def receive(plain: str | Sequence[Mapping[str, str]]) -> SchemaPrompt | None:
        """The prompt that was `sent` as exactly this text in this process, if it is remembered."""
        with _SENDING:
            return _SENT.get(_key(plain)) if _SENT else None


def _key(plain: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(plain, str):
        return digest(plain)
    return digest("chat", *(text for said in plain for text in (said["role"], said["content"])))


def _read_source(path: str | Path) -> str:
    """A PML file's text.

    Raises:
        PMLError: it cannot be read, or is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise PMLError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class Outline:
    """A node of a schema's tree, to be printed or written as JSON.

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


@dataclass(frozen=True)
class _Drawn:
    layout: SchemaLayout
    tokenization: Tokenization

    def schema(self, schema: SchemaNode) -> Outline:
        layout = self.layout
        around = [layout.begin] if layout.begin else layout.frames[-1:]
        ends = [self._template(run) for run in around if run.length]
        found = [self._node(child) for child in self._shown(schema.children)]
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
