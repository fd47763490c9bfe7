"""Tokens and their positions: of a schema, and of a prompt of it, for one tokenizer. Knows no KV.

Prompt Cache, section 3.3: a module begins after everything before it in the schema. All modules of
a union begin at the same position, and the union is as long as its longest module. A parameter
takes as many positions as its argument may have tokens. Unlike in the paper, the tokens of the chat
template have positions, too. What it puts around messages are called frames here: with them,
<system>, <user> and <assistant> become the markup that the model was trained on.

In a prompt of the "schema" layout (section 3.4), an imported module has the positions that the
schema gives it. New text takes positions in the gap before the next module; if it is longer than
the gap, everything after it moves on. In the "compact" layout there are no gaps, as in a prompt
written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

from tokenizers.decoders import ByteLevel

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.errors import ConfigError, PMLError
from cached_rag.pml.nodes import (
    Leaf,
    Mark,
    Message,
    Module,
    Node,
    Param,
    Path,
    SchemaNode,
    Text,
    Union,
)
from cached_rag.pml.prompt import Argument, Bit

Ids = tuple[int, ...]
_MARK = "\ue000content {}\ue001"


def frames(tokenization: Tokenization, roles: Sequence[str], *, open_answer: bool) -> list[str]:
    """The template's text before each message and after the last one: `len(roles) + 1` texts.

    Args:
        open_answer: end with the template's header of the assistant's answer.

    Raises:
        ConfigError: the model has no chat template, or it refuses these roles in this order.
    """
    marks = [_MARK.format(index) for index in range(len(roles))]
    messages = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
    text = tokenization.template.render(messages, open_answer=open_answer).text
    found: list[str] = []
    for mark in marks:
        before, there, text = text.partition(mark)
        if not there:
            raise ConfigError(
                "the model's chat template drops or reorders messages, so a schema cannot be laid "
                f"out by it; its roles are {', '.join(roles)}"
            )
        found.append(before)
    return [*found, text]


def role_marks(tokenization: Tokenization, role: str) -> tuple[str, str]:
    """The template's text before and after a message of a role, the same beside any messages.

    Raises:
        ConfigError: as `frames`, or that text depends on the messages beside it.
    """

    def around(*roles: str) -> list[str]:
        return frames(tokenization, roles, open_answer=False)

    said = around("user", "assistant", "user")
    ends = {"user": said[3], "assistant": around("user", "assistant")[2]}
    begins = {
        "user": _behind(ends["assistant"], said[2], role),
        "assistant": _behind(ends["user"], said[1], role),
    }
    if role in ends:
        return begins[role], ends[role]
    before, between, _ = around("system", "user")
    if not between.endswith(begins["user"]):
        raise _depends(role)
    bos = tokenization.tokenizer.decode(tokenization.begin_ids)
    return before.removeprefix(bos), between.removesuffix(begins["user"])


def answer_header(tokenization: Tokenization) -> str:
    """The template's text between a user's message and its answer.

    Raises:
        ConfigError: as `role_marks`.
    """
    _, end = role_marks(tokenization, "user")
    return _behind(end, frames(tokenization, ["user"], open_answer=True)[-1], "assistant")


def _behind(end: str, frame: str, role: str) -> str:
    """A frame without `end`, the text after the message before it."""
    if not frame.startswith(end):
        raise _depends(role)
    return frame.removeprefix(end)


def _depends(role: str) -> ConfigError:
    return ConfigError(
        f"what this model's chat template puts around <{role}> depends on the messages beside it, "
        "so that message cannot stand in a module; put it directly into the schema"
    )


def _markup_ids(tokenization: Tokenization, role: str, is_begin: bool) -> tuple[int, ...]:
    """Tokens of the template's text before or after a message of a role, or before an answer.

    Args:
        role: the message's; empty for the header of an answer.
        is_begin: before the message, else after it.

    Raises:
        ConfigError: as `role_marks`.
    """
    text = role_marks(tokenization, role)[not is_begin] if role else answer_header(tokenization)
    return _frame_ids(tokenization, text, is_first=False)


def _frame_ids(tokenization: Tokenization, frame: str, *, is_first: bool) -> tuple[int, ...]:
    """Tokens of a frame, with its control tokens obeyed. BOS is added only by the template."""
    if not frame:
        return ()
    if not is_first:  # behind a character, or SentencePiece would add a space before it
        tokens = tokenization.tokenize(Rendered("a" + frame, is_chat=True))
        if tokens.ends[0] == 1:
            return tuple(tokens.ids[1:])
    return tuple(tokenization.tokenize(Rendered(frame, is_chat=True)).ids)


# A list that grows without a copy of what it was.
Before = tuple["ModuleRun", "Before"] | None


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
        before: the last of the cached runs that every prompt with this one has before it, and those
            before that one; None for none.
    """

    ids: Ids
    start: int
    length: int
    unit: Path
    fill: Ids
    is_cached: bool
    before: Before = field(repr=False)

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.length

    @property
    def context(self) -> tuple[ModuleRun, ...]:
        """All runs that `before` has, in document order."""
        found, before = [], self.before
        while before is not None:
            run, before = before
            found.append(run)
        return tuple(reversed(found))

    @property
    def is_param(self) -> bool:
        """Whether this is the place of a parameter's argument."""
        return not self.ids


class SchemaLayout:
    """A schema's runs, each at its positions; turns its prompts into tokens.

    Attributes:
        texts: runs of texts, parameters and marks, by their number in the schema.
        frames: texts of the chat template, one before each message and one after the last, with
            their runs; none if messages stand in modules.
        begin: the run of BOS, with which every prompt begins; empty in a chat, whose template
            writes BOS.
        size: number of all positions.
        order: all runs in document order.
        markup: called with a role and whether its message begins; gives the template's token ids.
    """

    def __init__(self, schema: SchemaNode, tokenization: Tokenization) -> None:
        """Give all runs their positions, one after another.

        Raises:
            ConfigError: the model has no chat template and the schema has messages, or the template
                refuses them.
        """
        self._tokenization, self._unknown = tokenization, _unknown(tokenization)
        self.texts: dict[int, ModuleRun] = {}
        self.frames: list[tuple[str, ModuleRun]] = []
        self.size = 0
        self.order: list[ModuleRun] = []
        self.markup = cache(partial(_markup_ids, tokenization))
        self._framed = lru_cache(64)(self._framing)
        self._before: Before = None
        self._said: list[str] = []
        if schema.is_chat:
            roles = [child.role for child in schema.children if isinstance(child, Message)]
            self._said = frames(tokenization, roles, open_answer=False)
        self.begin = self._put(() if schema.is_chat else tokenization.begin_ids)
        self._nodes(schema.children)
        if schema.is_chat:
            self._frame()

    def _put(
        self, fill: Ids, unit: Path = (), *, is_cached: bool = True, room: int | None = None
    ) -> ModuleRun:
        """Put tokens, or a parameter's placeholder where there is `room` for its argument."""
        ids, length = (fill, len(fill)) if room is None else ((), room)
        run = ModuleRun(ids, self.size, length, unit, fill, is_cached, self._before)
        self.size = run.end
        if run.length:
            self.order.append(run)
            if is_cached:
                self._before = run, self._before
        return run

    def _frame(self) -> ModuleRun:
        """Put the chat template's next text."""
        text = self._said[len(self.frames)]
        run = self._put(_frame_ids(self._tokenization, text, is_first=not self.frames))
        self.frames.append((text, run))
        return run

    def _nodes(self, children: Sequence[Node]) -> None:
        for child in children:
            if isinstance(child, Leaf):
                assert child.number is not None
                self.texts[child.number] = self._leaf(child)
            elif isinstance(child, Union):
                self._union(child)
            else:
                before = self._before
                self._nodes(child.children)
                if isinstance(child, Module):
                    self._before = before

    def _leaf(self, leaf: Leaf) -> ModuleRun:
        if isinstance(leaf, Param):
            fill = self._placeholder(leaf)
            return self._put(fill, leaf.unit, is_cached=False, room=leaf.length)
        if isinstance(leaf, Text):
            ids = tuple(self._tokenization.following(leaf.text).ids)
        elif not self._said:
            ids = self.markup(leaf.role, leaf.is_begin)
        elif leaf.is_begin:
            return self._frame()
        else:
            ids = ()
        return self._put(ids, leaf.unit, is_cached=leaf.is_cached)

    def _union(self, union: Union) -> None:
        begin = longest = self.size
        stand_in: list[ModuleRun] = []
        for child in union.children:
            self.size, first = begin, len(self.order)
            self._nodes((child,))
            longest = max(longest, self.size)
            if child.name == union.stand_in and not child.has_params:  # arguments are not known
                stand_in = [run for run in self.order[first:] if run.unit == child.path]
        self.size = longest
        for run in stand_in:
            if run.is_cached:
                self._before = run, self._before

    def _placeholder(self, param: Param) -> Ids:
        """Tokens in an argument's place: the parameter's own, and unknown ones if there are any."""
        text = param.lead + param.placeholder if param.placeholder else ""
        ids = tuple(self._tokenization.following(text).ids)[: param.length] if text else ()
        return ids if self._unknown is None else ids + (self._unknown,) * (param.length - len(ids))

    def pieces(self, bits: Sequence[Bit]) -> list[PromptPiece]:
        """A prompt's tokens, the header of the answer included; no piece is empty.

        Raises:
            PMLError: an argument has more tokens than its parameter admits.
        """
        if self.frames:
            found = self._chat(bits)
        else:
            found = [_of(self.begin), *map(self._piece, bits)]
            if bits and isinstance(bits[-1], Mark):
                found.append(PromptPiece(self.markup("", True)))
        return [piece for piece in found if piece.ids]

    def _chat(self, bits: Sequence[Bit]) -> list[PromptPiece]:
        """A prompt of messages only, with the chat template around all of them."""
        begins = [bit for bit in bits if isinstance(bit, Mark) and bit.is_begin]
        *before, last = self._framed(tuple(mark.role for mark in begins))
        frames, found = iter(before), []
        for bit in bits:
            if not isinstance(bit, Mark):
                found.append(self._piece(bit))
            elif bit.is_begin:
                found += next(frames)
        # The pieces after the question are new text without a run, so that they are computed: some
        # methods take the last computed text for the question.
        return [*found, *(PromptPiece(piece.ids) for piece in last)]

    def _piece(self, bit: Bit) -> PromptPiece:
        if isinstance(bit, Text | Mark) and bit.number is not None:
            return _of(self.texts[bit.number])
        if isinstance(bit, Mark):
            return PromptPiece(self.markup(bit.role, bit.is_begin))
        ids = tuple(self._tokenization.following(bit.text).ids)
        if not isinstance(bit, Argument):
            return PromptPiece(ids)
        if len(ids) > bit.param.length:
            raise PMLError(
                f"the argument {bit.text.strip()!r} has {len(ids)} tokens and parameter "
                f"{bit.param.name!r} takes {bit.param.length} at most; shorten it, or raise len in "
                "the schema",
                bit.where,
            )
        return PromptPiece(ids, start=self.texts[bit.param.number].start)

    def _framing(self, roles: tuple[str, ...]) -> list[list[PromptPiece]]:
        """The template's text around messages, as the schema's runs where the text is theirs."""
        found = []
        for index, text in enumerate(frames(self._tokenization, roles, open_answer=True)):
            own, run = self.frames[index] if index < len(self.frames) else ("", None)
            if run is not None and run.ids and text.startswith(own):
                rest = _frame_ids(self._tokenization, text[len(own) :], is_first=False)
                found.append([_of(run), PromptPiece(rest)])
            else:
                ids = _frame_ids(self._tokenization, text, is_first=not index)
                found.append([PromptPiece(ids)])
        return found


def _unknown(tokenization: Tokenization) -> int | None:
    """The unknown token's id, which the paper puts in a parameter's place; None if there is none.

    A byte-level vocabulary has no unknown text. The token that its tokenizer calls unknown is a
    control token, mostly the end of a document; a module behind it would be read as a new document.
    """
    known = tokenization.tokenizer
    is_byte_level = isinstance(known.backend_tokenizer.decoder, ByteLevel)
    return None if is_byte_level or known.unk_token_id is None else int(known.unk_token_id)


@dataclass(frozen=True)
class PromptPiece:
    """Tokens that follow each other in the prompt.

    Attributes:
        run: the schema's run with these tokens; None for new text.
        start: the first token's position in the schema; None for new text.
    """

    ids: Ids
    run: ModuleRun | None = None
    start: int | None = None


def starts_of(pieces: Sequence[PromptPiece], *, is_compact: bool) -> list[int]:
    """The position of each piece's first token.

    Args:
        is_compact: there are no gaps, so that a token's position is its index.
    """
    found: list[int] = []
    moved = following = 0
    for piece in pieces:
        if piece.start is not None and not is_compact:
            moved = max(moved, following - piece.start)
            following = piece.start + moved
        found.append(following)
        following += len(piece.ids)
    return found


def _of(run: ModuleRun) -> PromptPiece:
    return PromptPiece(run.ids, run, run.start)
