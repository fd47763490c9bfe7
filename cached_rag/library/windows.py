"""Chunks of one document, prefilled in one pass. Takes token ids; knows no text and no store.

A chunk whose document stands before it while it is encoded has KV that is nearer to what full
prefill computes behind other chunks of that document, or of one like it: a page of a price list
that was read behind other pages knows that it is one of many (docs/quality.md, "Behind their
documents"). Of long documents up to half as many tokens more are computed, those of the leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cached_rag.backends.base import Backend
from cached_rag.kv.module import ModuleKV
from cached_rag.library.encode import encode_mean

# Most tokens of a window that stand there only for what follows, and are computed once more: two
# chunks of 256 tokens, or one of 512, with what is between them.
LEAD_TOKENS = 544
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A part of a document that one pass computes.

    Attributes:
        lead: chunks that the wanted ones are to stand behind; their KV is not kept.
        chunks: those behind them, in the document's order.
        between: tokens between two chunks.
    """

    lead: tuple[Ids, ...]
    chunks: tuple[Ids, ...]
    between: Ids

    def encode(self, model: Backend, prefixes: Sequence[ModuleKV | None]) -> Iterator[ModuleKV]:
        """The KV of each chunk; of several prefixes the mean. Errors as `encode_mean`."""
        places: list[int] = []
        whole: list[int] = []
        for ids in (*self.lead, *self.chunks):
            whole += self.between if whole else ()
            places.append(len(whole))
            whole += ids
        (kv,) = encode_mean(model, prefixes, [tuple(whole)])
        for begin, ids in zip(places[len(self.lead) :], self.chunks, strict=True):
            part = kv.slice(begin, begin + len(ids))
            yield ModuleKV(ids, part.start, part.keys.clone(), part.values.clone())


def windows(
    chunks: Sequence[Ids], is_wanted: Callable[[Ids], bool], between: Ids, most: int
) -> Iterator[Window]:
    """The windows in which a document's wanted chunks are computed.

    Args:
        chunks: of the document, in its order.
        is_wanted: whether a chunk's KV is to be computed. Others stand in a window only as its
            lead, or between wanted ones.
        most: tokens that a window may have, its lead among them; a single chunk may be longer.
    """
    begin = 0
    while begin < len(chunks):
        if not is_wanted(chunks[begin]):
            begin += 1
            continue
        end, size = begin + 1, len(chunks[begin])
        while end < len(chunks) and size + len(between) + len(chunks[end]) <= most - LEAD_TOKENS:
            size += len(between) + len(chunks[end])
            end += 1
        while not is_wanted(chunks[end - 1]):
            end -= 1
            size -= len(between) + len(chunks[end])
        lead = last_fitting(chunks[:begin], min(LEAD_TOKENS, most - size), len(between))
        yield Window(lead, tuple(chunks[begin:end]), between)
        begin = end


def last_fitting(texts: Sequence[Ids], room: int, between: int) -> tuple[Ids, ...]:
    """As many of the last texts as have at most `room` tokens, with `between` after each."""
    fitting: list[Ids] = []
    for ids in reversed(texts):
        room -= len(ids) + between
        if room < 0:
            break
        fitting.insert(0, ids)
    return tuple(fitting)
