"""One prompt's tokens and their positions. Knows layouts and tokens; knows no KV.

In the "schema" layout (Prompt Cache, section 3.4), an imported module has the positions that the
schema gives it. New text takes positions in the gap before the next module; if it is longer than
the gap, everything after it moves on. In the "compact" layout there are no gaps, as in a prompt
written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.errors import PMLError
from cached_rag.pml.frames import frame_ids, frames, markup_ids
from cached_rag.pml.layout import Ids, ModuleRun, SchemaLayout
from cached_rag.pml.nodes import Mark, Text
from cached_rag.pml.prompt import Argument, Bit


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


class Assembler:
    """Turns prompts of one schema into tokens."""

    def __init__(
        self, layout: SchemaLayout, tokenization: Tokenization, *, is_compact: bool
    ) -> None:
        self._layout, self._tokenization = layout, tokenization
        self._is_compact = is_compact
        self._frames = lru_cache(64)(self._framed)
        self._markup = cache(partial(markup_ids, tokenization))

    def pieces(self, bits: Sequence[Bit]) -> list[PromptPiece]:
        """A prompt's tokens, the header of the answer included.

        Raises:
            PMLError: an argument has more tokens than its parameter admits.
        """
        if self._layout.frames:
            return self._chat(bits)
        begin = self._layout.begin
        found = [_of(begin)] if begin and begin.ids else []
        found += [self._piece(bit) for bit in bits]
        if bits and isinstance(bits[-1], Mark):
            found.append(PromptPiece(self._markup("", True)))
        return found

    def _chat(self, bits: Sequence[Bit]) -> list[PromptPiece]:
        """A prompt of messages only, with the chat template around all of them."""
        begins = [bit for bit in bits if isinstance(bit, Mark) and bit.is_begin]
        *before, last = self._frames(tuple(mark.role for mark in begins))
        frames, found = iter(before), []
        for bit in bits:
            if not isinstance(bit, Mark):
                found.append(self._piece(bit))
            elif bit.is_begin:
                found += next(frames)
        # The pieces after the question are new text without a run, so that they are computed: some
        # methods take the last computed text for the question.
        return [*found, *(PromptPiece(piece.ids) for piece in last)]

    def positions(self, pieces: Sequence[PromptPiece]) -> list[int] | None:
        """The tokens' positions; None if there are no gaps, so that each is the token's index."""
        if self._is_compact:
            return None
        found: list[int] = []
        moved = following = 0
        for piece in pieces:
            if piece.start is not None:
                moved = max(moved, following - piece.start)
                following = piece.start + moved
            found += range(following, following + len(piece.ids))
            following += len(piece.ids)
        return found

    def _piece(self, bit: Bit) -> PromptPiece:
        if isinstance(bit, Text | Mark) and bit.number is not None:
            return _of(self._layout.texts[bit.number])
        if isinstance(bit, Mark):
            return PromptPiece(self._markup(bit.role, bit.is_begin))
        ids = tuple(self._tokenization.following(bit.text).ids)
        if not isinstance(bit, Argument):
            return PromptPiece(ids)
        if len(ids) > bit.param.length:
            raise PMLError(
                f"the argument {bit.text.strip()!r} has {len(ids)} tokens and parameter "
                f"{bit.param.name!r} takes {bit.param.length} at most; shorten it, or raise len in "
                "the schema",
                bit.where,
                bit.file,
            )
        return PromptPiece(ids, start=self._layout.texts[bit.param.number].start)

    def _framed(self, roles: tuple[str, ...]) -> list[list[PromptPiece]]:
        """The template's text around messages, as the schema's runs where the text is theirs."""
        found = []
        known = list(zip(self._layout.frames, self._layout.frame_texts, strict=True))
        for index, text in enumerate(frames(self._tokenization, roles, open_answer=True)):
            run, own = known[index] if index < len(known) else (None, "")
            if run is not None and run.ids and text.startswith(own):
                rest = frame_ids(self._tokenization, text[len(own) :], is_first=False)
                found.append([_of(run), *([PromptPiece(rest)] if rest else [])])
            else:
                found.append([PromptPiece(frame_ids(self._tokenization, text, is_first=not index))])
        return found


def _of(run: ModuleRun) -> PromptPiece:
    return PromptPiece(run.ids, run, run.start)
