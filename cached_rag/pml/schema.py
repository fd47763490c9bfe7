"""`Schema`, a set of reusable prompt modules (Prompt Cache), its outline, and prompts of it.

These are the classes that users see. `planner.py` lays out and encodes a schema on an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cachetools import LRUCache

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.engine import Engine
from cached_rag.engine.planner import Planner
from cached_rag.errors import PMLError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import EncodeSummary
from cached_rag.options import require
from cached_rag.pml.layout import ModuleRun, SchemaLayout
from cached_rag.pml.markup import parse_markup
from cached_rag.pml.nodes import Leaf, Mark, Message, Module, Node, Param, SchemaNode, Union
from cached_rag.pml.parse import parse_schema
from cached_rag.pml.planner import PromptPlanner, SchemaPlanner
from cached_rag.pml.program import Program, read_function
from cached_rag.pml.prompt import Bit, Import, Part, Said, messages, new_text, parse_prompt, select
from cached_rag.pml.units import BEHIND

# Prompts that were handed to a framework as plain text, by that text, so that the LLM at its other
# end finds the prompt again (`SchemaPrompt.sent`, `receive`). So many characters of new text are
# remembered in all, and each prompt counts as that many more.
_REMEMBERED, _EACH = 1 << 24, 1 << 10
_SENT: LRUCache[str, SchemaPrompt] = LRUCache(
    _REMEMBERED, lambda prompt: len(new_text(prompt.bits)) + _EACH
)
_SENDING = threading.Lock()
# The planners of each engine, by their schemas' digests, so that each schema is laid out once.
_KNOWN: WeakKeyDictionary[Engine, LRUCache[str, SchemaPlanner]] = WeakKeyDictionary()
_LOOKING = threading.Lock()
_PLANNERS = 64  # of an engine
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
            given = getattr(self, name)
            require(given in known, f"{name} is one of {', '.join(known)}, not {given!r}")

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
        layout = SchemaLayout(self.node, tokenization)
        found = [_drawn(child, layout, tokenization) for child in self.node.children]
        found.insert(0, _template(layout.begin, tokenization))
        found += [_template(run, tokenization) for _, run in layout.frames[-1:]]
        return Outline("schema", self.name, layout.size, 0, layout.size, _shown(found))

    def prompt(self, /, *parts: Part, **arguments: str) -> SchemaPrompt:
        """Make a prompt of imports, new text between and after them, and new messages at the end.

        Args:
            parts: `Import`s, strings and `Said`s. Strings are never parsed as PML.
            arguments: arguments of the schema's parameters outside all modules.

        Raises:
            PMLError: it imports or sets what the schema does not have; or one of the parts is none.
        """
        return SchemaPrompt(self, Import(self.name, *parts, **arguments))

    def prompt_from_string(self, source: str, *, file: str | None = None) -> SchemaPrompt:
        """Parse a <prompt>.

        Raises:
            PMLError: it is not valid, or of another schema.
        """
        return SchemaPrompt(self, parse_prompt(parse_markup(source, file), self.name))

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
        """The planner of all the schema's prompts on an engine; made once. Safe for threads.

        Raises:
            ClosedError: the engine was closed.
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        engine.check_open()
        with _LOOKING:
            known = _KNOWN.setdefault(engine, LRUCache(_PLANNERS))
            if self.digest not in known:
                known[self.digest] = SchemaPlanner.of(self.node, engine, self.layout, self.behind)
            return known[self.digest]


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt derived from a schema, for `Engine.generate`.

    Attributes:
        imported: what it imports of the schema, and adds.
        bits: the whole prompt in order, see `select`.

    Raises:
        PMLError: it imports or sets what the schema does not have.
    """

    schema: Schema
    imported: Import
    bits: tuple[Bit, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", select(self.schema.node, self.imported))

    def then(self, *parts: str | Said) -> SchemaPrompt:
        """The prompt with text or messages added at its end."""
        old = self.imported
        more = Import(old.name, *old.parts, *parts, **old.arguments).at(old.where)
        return SchemaPrompt(self.schema, more)

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
        pieces = self.schema.planner(engine).layout.pieces(self.bits)
        return sum(len(piece.ids) for piece in pieces)

    def sent(self) -> str | list[dict[str, str]]:
        """As `plain`; remembers the prompt, so that `receive` finds it by the plain text."""
        plain = self.plain()
        key = _key(plain)
        with _SENDING, suppress(ValueError):  # too large to be remembered
            _SENT[key] = self
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


def _drawn(node: Node, layout: SchemaLayout, tokenization: Tokenization) -> Outline:
    if isinstance(node, Leaf):
        assert node.number is not None
        run = layout.texts[node.number]
        if isinstance(node, Mark):
            return _template(run, tokenization)
        if isinstance(node, Param):
            return Outline("param", f"{node.name} (at most {node.length})", 0, run.start, run.end)
        return Outline("text", _short(node.text), run.length, run.start, run.end)
    children = _shown(_drawn(child, layout, tokenization) for child in node.children)
    taken = [child for child in children if child.end > child.start]  # modules may be empty
    start = min((child.start for child in taken), default=0)
    end = max((child.end for child in taken), default=start)
    sizes = [child.tokens for child in children]
    if isinstance(node, Union):
        return Outline("union", "", max(sizes), start, end, children)
    kind = node.role if isinstance(node, Message) else "module"
    label = node.name if isinstance(node, Module) else ""
    return Outline(kind, label, sum(sizes), start, end, children)


def _shown(drawn: Iterable[Outline]) -> tuple[Outline, ...]:
    """The nodes, without those of a chat template that has no text there."""
    return tuple(one for one in drawn if one.kind != "template" or one.tokens)


def _template(run: ModuleRun, tokenization: Tokenization) -> Outline:
    text = tokenization.tokenizer.decode(run.ids)
    return Outline("template", _short(text), run.length, run.start, run.end)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
