"""Positions of everything in a schema, for one tokenizer. Knows tokens; knows no KV and no prompt.

Prompt Cache, section 3.3: a module begins where all before it in the schema ends; a union is as
long as its longest child, and its children begin together; a parameter takes as many positions as
its argument may have tokens. Other than in the paper, chat templates have positions too.
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
class Run:
    """Tokens that stand together, and belong to one module or to every prompt.

    Attributes:
        ids: empty where an argument will stand.
        start: position of the first.
        length: positions taken.
        unit: path of the module whose own they are; empty for what every prompt contains.
        fill: what stands there while the module is encoded: the ids themselves, or a parameter's
            placeholder, which may leave positions empty.
    """

    ids: Ids
    start: int
    length: int
    unit: Path
    fill: Ids
    is_cached: bool = True

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + self.length

    @property
    def is_param(self) -> bool:
        """Whether an argument stands there."""
        return not self.ids


@dataclass(frozen=True)
class Layout:
    """A schema's runs.

    Attributes:
        texts: of texts, parameters and marks, by their number in the schema.
        frames: of the chat template around messages: one before each, one after the last.
        frame_texts: what those say.
        begin: tokens every prompt begins with that no text has (BOS); empty in chats, whose
            template has it.
        size: positions in all.
        order: all runs in document order.
    """

    texts: dict[int, Run]
    frames: tuple[Run, ...]
    frame_texts: tuple[str, ...]
    begin: Run | None
    size: int
    order: tuple[Run, ...]


@dataclass
class _Setter:
    """Sets runs one behind the other, as a typesetter does.

    Attributes:
        markup: of a role's message, at its begin or end.
    """

    tokenization: Tokenization
    unknown: int | None
    markup: Callable[[str, bool], Ids]
    position: int = 0
    texts: dict[int, Run] = field(default_factory=dict)
    order: list[Run] = field(default_factory=list)
    begins: list[Run] = field(default_factory=list)

    def put(self, ids: Ids, unit: Path = (), *, is_cached: bool = True) -> Run:
        run = Run(ids, self.position, len(ids), unit, ids, is_cached)
        return self._add(run)

    def _add(self, run: Run) -> Run:
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
                run = Run((), self.position, child.length, child.unit, fill, is_cached=False)
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


def lay_out(schema: SchemaNode, tokenization: Tokenization) -> Layout:
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
    return Layout(
        setter.texts,
        tuple(around),
        tuple(said),
        begin,
        setter.position,
        tuple(setter.order),
    )


def _unknown(tokenization: Tokenization) -> int | None:
    """The unknown token, as which the paper encodes parameters; None if the vocabulary has none.

    To a byte-level vocabulary nothing is unknown. What its tokenizer names so is a control token,
    most often the end of a document, behind which a module would be read as another document.
    """
    known = tokenization.tokenizer
    is_byte_level = isinstance(known.backend_tokenizer.decoder, ByteLevel)
    return None if is_byte_level or known.unk_token_id is None else int(known.unk_token_id)
