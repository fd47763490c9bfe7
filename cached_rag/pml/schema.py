"""`Schema`, a language for reusable prompts (Prompt Cache), and the prompts derived from it.

What users see of it; how one is laid out and encoded on an engine is others' work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from cached_rag.engine.engine import Engine
from cached_rag.engine.planner import Planner
from cached_rag.errors import ConfigError, PMLError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import EncodeSummary
from cached_rag.pml.known import known_planner
from cached_rag.pml.markup import parse_markup
from cached_rag.pml.nodes import SchemaNode, Where
from cached_rag.pml.parse import parse_schema
from cached_rag.pml.parse_prompt import parse_prompt
from cached_rag.pml.planner import PromptPlanner, SchemaPlanner, planner_of
from cached_rag.pml.program import Program, read_function
from cached_rag.pml.prompt import Bit, Part, Said, messages, select
from cached_rag.pml.units import BEHIND

# Prompts on their way through a framework that carries text only; found again by that text.
_REMEMBERED = 256
_SENT: LRUCache[str, SchemaPrompt] = LRUCache(_REMEMBERED)
_SENDING = threading.Lock()
LAYOUTS = ("auto", "compact", "schema")


@dataclass(frozen=True, eq=False)
class Schema:
    """Named modules, parameters and unions, of which prompts are made.

    Attributes:
        node: what it says.
        layout: "schema" puts modules where the schema has them, with gaps for what a prompt leaves
            out (the paper's); "compact" moves what is imported together; "auto" is compact where
            the model's keys can be moved.
        behind: what modules are encoded behind: "nothing" (the paper), the schema's "head", or all
            of the "schema" that is in every prompt.
        file: where it was read from, for errors.
        source: as it was read; of a function, a digest of what it may yield.
    """

    node: SchemaNode
    source: str
    layout: str = "auto"
    behind: str = "schema"
    file: str | None = None

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
            PMLError: it is wrong; with line, column and what was probably meant.
        """
        return cls(parse_schema(parse_markup(source, file), file), source, layout, behind, file)

    @classmethod
    def from_file(cls, path: str | Path, *, layout: str = "auto", behind: str = "schema") -> Schema:
        """As `from_string`, from a UTF-8 file.

        Raises:
            PMLError: it cannot be read, or is wrong.
        """
        source = read_source(path)
        return cls.from_string(source, layout=layout, behind=behind, file=str(path))

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        layout: str | None = None,
        behind: str | None = None,
    ) -> Schema:
        """All that a function may yield; see `prompt_function`, whose calls are prompts.

        Args:
            layout, behind: None for the decorator's, if it is decorated, else for the defaults.

        Raises:
            PMLError: it does what a schema cannot say; the error names file and line.
        """
        found = getattr(function, "schema", None)
        if not isinstance(found, Schema):
            found = cls.from_program(read_function(function))
        return replace(found, layout=layout or found.layout, behind=behind or found.behind)

    @classmethod
    def from_program(cls, program: Program) -> Schema:
        """As `from_function`, of one that was read."""
        root = program.element("schema", program.name, program.where)
        node = parse_schema(root, program.file)
        return cls(node, digest(repr(node)), file=program.file)

    @property
    def name(self) -> str:
        """What prompts call it."""
        return self.node.name

    @property
    def digest(self) -> str:
        """Equal for schemas that say the same and are laid out in the same way."""
        return digest(self.source, self.layout, self.behind)

    def prompt(self, /, *parts: Part, **arguments: str) -> SchemaPrompt:
        """A prompt from Python: imports, new text between and behind them, new messages at the end.

        Args:
            parts: `Import`s, strings and `Said`s. Strings are text and nothing else, whatever they
                hold.
            arguments: of the schema's own parameters.

        Raises:
            PMLError: it asks for what the schema does not have.
        """
        return SchemaPrompt(self, parts, arguments)

    def prompt_from_string(self, source: str, *, file: str | None = None) -> SchemaPrompt:
        """A prompt from a <prompt>.

        Raises:
            PMLError: it is wrong, or of another schema.
        """
        root = parse_markup(source, file)
        parts, arguments = parse_prompt(root, file)
        wanted = root.attributes.get("schema", self.name)
        if wanted != self.name:
            raise PMLError(
                f"this prompt is of schema {wanted!r}, and this is {self.name!r}", root.where, file
            )
        return SchemaPrompt(self, tuple(parts), arguments, root.where, file)

    def prompt_from_file(self, path: str | Path) -> SchemaPrompt:
        """As `prompt_from_string`, from a UTF-8 file."""
        return self.prompt_from_string(read_source(path), file=str(path))

    def encode(
        self, engine: Engine, progress: Callable[[str], object] = lambda _: None
    ) -> EncodeSummary:
        """Prefill all modules now; else each is, when a prompt first needs it.

        Args:
            progress: called with each module's name when it is there.

        Raises:
            ContextOverflowError: a module stands beyond the model's context.
            RelocationError: one stands where the model's rotary frequencies change.
            StoreFullError: no room left; what was encoded before is kept.
        """
        return self.planner(engine).encode(progress)

    def missing(self, engine: Engine) -> list[str]:
        """Names of what `encode` would prefill; empty for text that is in every prompt."""
        return [unit.name for unit in self.planner(engine).missing()]

    def planner(self, engine: Engine) -> SchemaPlanner:
        """Its layout and encodings on an engine, for all its prompts; made once.

        Raises:
            ClosedError: the engine was closed.
            ConfigError: the model's chat template does not admit the schema's messages.
        """
        make = partial(planner_of, self.node, engine, layout=self.layout, behind=self.behind)
        return known_planner(engine, self.digest, make)


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt derived from a schema, for `Engine.generate`.

    Attributes:
        parts, arguments: as `Schema.prompt` takes them.
        where, file: where it was read, for errors.
        bits: all of it, in its order.

    Raises:
        PMLError: it asks for what the schema does not have.
    """

    schema: Schema
    parts: tuple[Part, ...]
    arguments: Mapping[str, str]
    where: Where | None = None
    file: str | None = None
    bits: tuple[Bit, ...] = field(init=False)

    def __post_init__(self) -> None:
        bits = select(self.schema.node, self.parts, self.arguments, self.where, self.file)
        object.__setattr__(self, "bits", bits)

    def then(self, *parts: str | Said) -> SchemaPrompt:
        """The prompt with more at its end: text, or messages."""
        return replace(self, parts=(*self.parts, *parts))

    def plain(self) -> str | list[dict[str, str]]:
        """The same for any model: a string, or chat messages."""
        if not self.schema.node.has_messages:
            return "".join(bit.text for bit in self.bits)
        return [{"role": role, "content": text} for role, text in messages(self.bits)]

    def planner(self, engine: Engine) -> Planner:
        """See `Planned`: how an engine answers it."""
        return PromptPlanner(self.schema.planner(engine), self.bits)

    def count_tokens(self, engine: Engine) -> int:
        """How many tokens it has on an engine."""
        return self.schema.planner(engine).count_tokens(self.bits)

    def sent(self) -> str | list[dict[str, str]]:
        """As `plain`, remembered for a while, so that who gets it can `receive` it whole."""
        plain = self.plain()
        with _SENDING:
            _SENT[_key(plain)] = self
        return plain

    @staticmethod
    def receive(plain: str | Sequence[Mapping[str, str]]) -> SchemaPrompt | None:
        """The prompt that was lately `sent` in this process as exactly this, if there is one."""
        with _SENDING:
            return _SENT.get(_key(plain)) if _SENT else None


def _key(plain: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(plain, str):
        return digest(plain)
    return digest("chat", *(text for said in plain for text in (said["role"], said["content"])))


def read_source(path: str | Path) -> str:
    """A PML file's text.

    Raises:
        PMLError: it cannot be read, or is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PMLError(f"{path} cannot be read: {error}") from error
