"""Finds known modules in a rendered prompt by exact text, and their tokens in its tokens.

Knows text, offsets and ids; knows no KV and no model. No match is never an error: it means
ordinary prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cached_rag.backends.tokenizer import Tokens
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.store.catalog import ModuleRecord

ANCHOR = 32
# A neighbour's characters can merge with a module's outermost tokens, not further in.
_MAX_TRIM = 4


@dataclass(frozen=True)
class Occurrence:
    """A module's text at characters `begin` to `end` of a prompt."""

    begin: int
    end: int
    module: ModuleRecord


@dataclass(frozen=True)
class Alignment:
    """Prompt tokens `begin` to `end` are the module's tokens from `offset` on."""

    begin: int
    end: int
    offset: int
    module: ModuleRecord


class ModuleTable:
    """All known modules by their first 32 characters."""

    def __init__(self) -> None:
        self._by_anchor: dict[str, list[ModuleRecord]] = {}
        self._by_digest: dict[str, ModuleRecord] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def get(self, text: str) -> ModuleRecord | None:
        """The record of exactly this text."""
        return self._by_digest.get(digest(text))

    def add(self, module: ModuleRecord) -> None:
        """Know one more module; one that is known already changes nothing."""
        if module.text_digest in self._by_digest:
            return
        self._by_digest[module.text_digest] = module
        same = self._by_anchor.setdefault(module.anchor, [])
        same.append(module)
        same.sort(key=lambda record: -record.length)

    def clear(self) -> None:
        """Forget all."""
        self._by_anchor.clear()
        self._by_digest.clear()

    def discard(self, modules: Iterable[ModuleRecord]) -> None:
        """Forget some."""
        for module in modules:
            if self._by_digest.pop(module.text_digest, None) is not None:
                self._by_anchor[module.anchor].remove(module)

    def find(self, text: str) -> Iterator[Occurrence]:
        """Modules in `text`, leftmost first, the longest at each place, without overlaps.

        One dictionary look-up a character; a text's digest is taken only where an anchor hits.
        """
        begin, last = 0, len(text) - ANCHOR
        anchors = self._by_anchor
        while begin <= last:
            candidates = anchors.get(text[begin : begin + ANCHOR])
            module = candidates and _longest(candidates, text, begin)
            if module:
                yield Occurrence(begin, begin + module.length, module)
                begin += module.length
            else:
                begin += 1


def _longest(candidates: list[ModuleRecord], text: str, begin: int) -> ModuleRecord | None:
    for module in candidates:
        if digest(text[begin : begin + module.length]) == module.text_digest:
            return module
    return None


def record_of(text: str, tokens: Tokens) -> ModuleRecord:
    """The record by which a text is found; `tokens` are its own, tokenised by itself."""
    return ModuleRecord(
        text_digest=digest(text),
        anchor=text[:ANCHOR],
        length=len(text),
        token_ids=tuple(tokens.ids),
        token_starts=tuple(tokens.starts),
    )


def align(found: Occurrence, prompt: Tokens) -> Alignment | None:
    """The longest run of the prompt's tokens inside the module that are the module's own.

    Returns:
        None if more than a few outermost tokens differ (the module then is prefilled as text).
    """
    module = found.module
    ids, starts = module.token_ids, module.token_starts
    stop = bisect_left(prompt.starts, found.end)
    for offset in range(min(_MAX_TRIM + 1, len(ids))):
        begin = bisect_left(prompt.starts, found.begin + starts[offset])
        length = min(len(ids) - offset, stop - begin)
        while length and (
            prompt.ends[begin + length - 1] > found.end
            or prompt.ids[begin + length - 1] != ids[offset + length - 1]
        ):
            length -= 1
            if len(ids) - offset - length > _MAX_TRIM:
                break
        missing = len(ids) - offset - length
        if missing > _MAX_TRIM or not length:
            continue
        if tuple(prompt.ids[begin : begin + length]) == ids[offset : offset + length]:
            return Alignment(begin, begin + length, offset, module)
    return None
