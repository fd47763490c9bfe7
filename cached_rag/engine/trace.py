"""What became of each of a prompt's tokens, as a record that holds no KV.

A `TraceSource` is noted while a prompt is prefilled, in a few array operations. An answer has it,
and the readable `Trace` is made of it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cached_rag.backends.machine import ProfileKey, kept_profile
from cached_rag.backends.prompt_text import Tokens
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.library.matching import Match
from cached_rag.library.plan import Plan
from cached_rag.library.shelf import Origin
from cached_rag.methods import Layout, Selector

Counts = dict["Kind", int]


class Kind(Enum):
    """What became of a token. The first three are the report's `cached_tokens`."""

    IN_PLACE = "in place"  # KV of the same text behind the same text, used as it is
    MOVED = "moved"  # KV that was computed behind other text, used as it is
    IN_PART = "in part"  # that, but the method computed its first layers again
    REPAIRED = "repaired"  # there was KV, and every layer was computed again
    COMPUTED = "computed"  # there was no KV that the method uses


_KINDS = tuple(Kind)


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one kind and one part.

    Attributes:
        begin, end: characters in `Trace.text`; equal for tokens without text of their own.
        tokens: how many.
        part: index in `Trace.parts`; None for text between them.
    """

    begin: int
    end: int
    tokens: int
    kind: Kind
    part: int | None


@dataclass(frozen=True)
class TracePart:
    """A chunk in a prompt, or other text that KV was taken for.

    Attributes:
        digest: of the chunk's text; empty for no chunk.
        name: of a schema's module; else empty.
        state: "hit", "missed" (it has no KV) or "unused" (its KV is none that the method takes).
        counts: how many of its tokens became what.
        origin: where its KV came from; None if none was used.
        moved_by: positions that its keys were moved by.
    """

    digest: str = ""
    name: str = ""
    state: str = "hit"
    counts: Counts = field(default_factory=dict)
    origin: Origin | None = None
    moved_by: int = 0

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class Trace:
    """What became of a prompt.

    Attributes:
        text: the prompt's, with the chat template applied.
        spans: in order, without gaps: their texts joined are `text`.
        parts: in order.
        full_ms: estimated milliseconds to compute all of it, by a profile that was measured for
            this model on this machine; None if there is no such profile.
    """

    text: str
    spans: tuple[Span, ...]
    parts: tuple[TracePart, ...]
    full_ms: float | None = None

    @property
    def counts(self) -> Counts:
        """How many of the prompt's tokens became what; as many in all as it has."""
        return {kind: sum(span.tokens for span in self.spans if span.kind is kind) for kind in Kind}


# (first token, token after the last, what these tokens are).
_Part = tuple[int, int, TracePart]


@dataclass(frozen=True, eq=False, repr=False)
class TraceSource:
    """What a trace is made of: of an engine the tokenizer alone, so that the rest can be freed.

    Attributes:
        kinds: (seq_len,) uint8, indices into `Kind`'s members.
        uses: where KV came from, before its tokens are counted.
        matches: the known chunks.
        tokens, text: the prompt's. Where tokens have no offsets, as those of a schema's prompt, the
            text is put together from them.
        profile_key: of the model's profile on this machine.
    """

    kinds: npt.NDArray[np.uint8]
    uses: tuple[_Part, ...]
    matches: tuple[Match, ...]
    tokens: Tokens
    text: str
    tokenization: Tokenization
    profile_key: ProfileKey

    def repaired(self, rows: torch.Tensor) -> TraceSource:
        """The same, but (num_rows,) slots, all of tokens with KV, were computed again."""
        kinds = self.kinds.copy()  # whoever reads this one meanwhile sees none of it
        kinds[rows.cpu().numpy()] = _KINDS.index(Kind.REPAIRED)
        return replace(self, kinds=kinds)

    @cached_property
    def trace(self) -> Trace:
        """The readable record, made when it is first asked for."""
        tokens, text = self.tokens, self.text
        parts = sorted(self._parts(), key=lambda one: one[0])
        owners = np.full(len(self.kinds), -1)
        for index, (begin, end, _) in enumerate(parts):
            owners[begin:end] = index
        changes = (np.diff(self.kinds) != 0) | (np.diff(owners) != 0)
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self.kinds)]
        if tokens.ends[-1]:
            edges = [*accumulate((tokens.starts[cut] for cut in cuts[1:-1]), max, initial=0)]
            edges.append(len(text))
        else:
            pieces = self.tokenization.texts(tokens.ids, cuts)
            edges, text = [*accumulate(map(len, pieces), initial=0)], "".join(pieces)
        spans = tuple(
            Span(
                *(edges[i], edges[i + 1], cuts[i + 1] - first),
                _KINDS[self.kinds[first]],
                int(owners[first]) if owners[first] >= 0 else None,
            )
            for i, first in enumerate(cuts[:-1])
        )
        profile = kept_profile(self.profile_key)
        full_ms = None if profile is None else profile.compute_s(len(tokens)) * 1000
        return Trace(text, spans, tuple(part for _, _, part in parts), full_ms)

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes the trace, not the tokenizer."""
        return {"trace": self.trace}

    def _parts(self) -> Iterator[_Part]:
        """The chunks, and other runs of tokens with KV, in any order."""
        for match in self.matches:
            part = TracePart(state="unused" if match.encoded_after else "missed")
            used = max(self.uses, key=lambda use: _common(use, match), default=None)
            if used is not None and _common(used, match) > 0:
                part = used[2]
            part = replace(part, digest=match.chunk.text_digest)
            yield self._counted(match.begin, match.end, part)
        for use in self.uses:
            if all(_common(use, match) <= 0 for match in self.matches):
                yield self._counted(*use)

    def _counted(self, begin: int, end: int, part: TracePart) -> _Part:
        found = np.bincount(self.kinds[begin:end], minlength=len(_KINDS)).tolist()
        return begin, end, replace(part, counts=dict(zip(_KINDS, found, strict=True)))


def kinds_of(layout: Layout, rows: torch.Tensor, method: Selector) -> npt.NDArray[np.uint8]:
    """What becomes of each of a prompt's tokens.

    Args:
        rows: (num_rows,) int64 slots that are computed in every layer.
    """
    kinds = torch.full(layout.fresh.shape, _KINDS.index(Kind.MOVED), dtype=torch.uint8)
    kinds[layout.exact] = _KINDS.index(Kind.IN_PLACE)
    if method.check_layers(layout):  # the first layers have other rows
        kinds[method.first_rows(layout) & layout.reused] = _KINDS.index(Kind.IN_PART)
    kinds[rows.cpu()] = _KINDS.index(Kind.REPAIRED)
    kinds[layout.fresh] = _KINDS.index(Kind.COMPUTED)
    return kinds.numpy()


def uses_of(plan: Plan) -> tuple[_Part, ...]:
    """Where the KV of a prompt's tokens comes from."""
    return tuple(
        (p.begin, p.end, TracePart(name=p.name, origin=p.origin, moved_by=plan.delta(p)))
        for p in plan.placements
    )


def _common(use: _Part, match: Match) -> int:
    """How many tokens a placement and a chunk have in common; not positive if none."""
    return min(use[1], match.end) - max(use[0], match.begin)
