"""The positions of all tokens of a schema, for one tokenizer. Knows no KV and no prompt.

Prompt Cache, section 3.3: a module begins after everything before it in the schema. All modules of
a union begin at the same position, and the union is as long as its longest module. A parameter
takes as many positions as its argument may have tokens. Unlike in the paper, the tokens of the chat
template have positions, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from tokenizers.decoders import ByteLevel

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.pml.frames import frame_ids, frames, markup_ids
from cached_rag.pml.nodes import Mark, Node, Param, Path, SchemaNode, Text, Union

Ids = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModuleRun:
    """Neighbouring tokens that belong to one module, or to every prompt.

    Attributes:
        ids: token ids; empty for a parameter.
        start: position of the first token.
        length: number of positions.
        unit: path of the module that contains the tokens directly; empty if every prompt does.
        fill: tokens that are encoded there: `ids`, or a parameter's placeholder, which may have
            fewer tokens than there are positions.
        is_cached: whether KV of these tokens is kept.
    """

    ids: Ids
    start: int
    length: int
    unit: Path
    fill: Ids
    is_cached: bool = True

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.length

    @property
    def is_param(self) -> bool:
        """Whether this is the place of a parameter's argument."""
        return not self.ids


@dataclass(frozen=True)
class SchemaLayout:
    """A schema's runs.

    Attributes:
        texts: runs of texts, parameters and marks, by their number in the schema.
        frames: runs of the chat template: one before each message, one after the last.
        frame_texts: the text of each of `frames`.
        begin: the run of BOS, with which every prompt begins; None in a chat, whose template
            writes BOS.
        size: number of all positions.
        order: all runs in document order.
    """

    texts: dict[int, ModuleRun]
    frames: tuple[ModuleRun, ...]
    frame_texts: tuple[str, ...]
    begin: ModuleRun | None
    size: int
    order: tuple[ModuleRun, ...]


@dataclass
class _Setter:
    """Gives runs their positions, one run after another.

    Attributes:
        unknown: id of the unknown token that stands for an argument; None for none.
        markup: called with a role and whether its message begins; gives the template's token ids.
        position: of the next run.
    """

    tokenization: Tokenization
    unknown: int | None
    markup: Callable[[str, bool], Ids]
    position: int = 0
    texts: dict[int, ModuleRun] = field(default_factory=dict)
    order: list[ModuleRun] = field(default_factory=list)
    begins: list[ModuleRun] = field(default_factory=list)

    def put(self, ids: Ids, unit: Path = (), *, is_cached: bool = True) -> ModuleRun:
        run = ModuleRun(ids, self.position, len(ids), unit, ids, is_cached)
        return self._add(run)

    def _add(self, run: ModuleRun) -> ModuleRun:
        self.position = run.end
        if run.length:
            self.order.append(run)
        return run

    def nodes(self, children: tuple[Node, ...]) -> None:
        for child in children:
            if isinstance(child, Text):
                ids = tuple(self.tokenization.following(child.text).ids)
                self.texts[child.number] = self.put(ids, child.unit, is_cached=child.is_cached)
            elif isinstance(child, Param):
                fill = self._placeholder(child)
                run = ModuleRun((), self.position, child.length, child.unit, fill, is_cached=False)
                self.texts[child.number] = self._add(run)
            elif isinstance(child, Mark):
                assert child.number is not None
                ids = self.markup(child.role, child.is_begin)
                run = self.put(ids, child.unit, is_cached=child.is_cached)
                self.texts[child.number] = run
                if child.is_begin:
                    self.begins.append(run)
            elif isinstance(child, Union):
                self._union(child)
            else:
                self.nodes(child.children)

    def _union(self, union: Union) -> None:
        begin = longest = self.position
        for child in union.children:
            self.position = begin
            self.nodes((child,))
            longest = max(longest, self.position)
        self.position = longest

    def _placeholder(self, param: Param) -> Ids:
        text = param.lead + param.placeholder if param.placeholder else ""
        ids = tuple(self.tokenization.following(text).ids)[: param.length] if text else ()
        return ids if self.unknown is None else ids + (self.unknown,) * (param.length - len(ids))


def lay_out(schema: SchemaNode, tokenization: Tokenization) -> SchemaLayout:
    """All positions of a schema.

    Raises:
        ConfigError: the model has no chat template and the schema has messages, or the template
            refuses them.
    """
    unknown = _unknown(tokenization)
    begin, around, said = None, [], []
    if schema.is_chat:
        said = frames(tokenization, [m.role for m in schema.messages], open_answer=False)
        ids = [frame_ids(tokenization, text, is_first=not i) for i, text in enumerate(said)]
        following = iter(ids)
        setter = _Setter(tokenization, unknown, lambda _, begins: next(following) if begins else ())
        setter.nodes(schema.children)
        around = [*setter.begins, setter.put(ids[-1])]
    else:
        setter = _Setter(tokenization, unknown, cache(partial(markup_ids, tokenization)))
        begin = setter.put(tokenization.begin_ids)
        setter.nodes(schema.children)
    return SchemaLayout(
        setter.texts,
        tuple(around),
        tuple(said),
        begin,
        setter.position,
        tuple(setter.order),
    )


def _unknown(tokenization: Tokenization) -> int | None:
    """The unknown token's id, which the paper puts in a parameter's place; None if there is none.

    A byte-level vocabulary has no unknown text. The token that its tokenizer calls unknown is a
    control token, mostly the end of a document; a module behind it would be read as a new document.
    """
    known = tokenization.tokenizer
    is_byte_level = isinstance(known.backend_tokenizer.decoder, ByteLevel)
    return None if is_byte_level or known.unk_token_id is None else int(known.unk_token_id)
