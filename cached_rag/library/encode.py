"""Prefills chunks ahead of time, behind a prefix: in batches, or those of a document in one pass.

A chunk that is encoded right behind the prefix gets the KV of a prompt's first text, which it
rarely is when it is used. With any other text before it, its KV is nearer to what full prefill
would compute (docs/quality.md): contexts are such texts. FusionRAG takes the chunk's nearest
neighbours.
A chunk whose document stands before it while it is encoded has KV that is nearer to what full
prefill computes behind other chunks of that document, or of one like it: a page of a price list
that was read behind other pages knows that it is one of many (docs/quality.md, "Behind their
documents"). Of long documents up to half as many tokens more are computed, those of the leads.
Takes token ids, gives KV; knows no prompt, no method and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Literal

import torch

from cached_rag.backends.base import Backend
from cached_rag.config import MOST_PRIMERS
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.kv.buffer import Change, KVBuffer, ModuleKV
from cached_rag.kv.catalog import MAX_TRIM
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.layers import Layered, each, stacks_of
from cached_rag.kv.positions import PositionRule

# Tokens in a batch, padding included: enough to keep the cores busy, and few enough that the batch
# stays in their caches.
BATCH_TOKENS = 2048
_IN_PLACE = PositionRule()
# First tokens of a chunk that `compose` computes again, and how many it computes of each in all.
COMPOSE_ANCHORS = 8
SHORTEST_COMPOSED = COMPOSE_ANCHORS + MAX_TRIM
_NAMING = 40
Ids = tuple[int, ...]
# Most tokens of a window that stand there only for what follows, and are computed once more: two
# chunks of 256 tokens, or one of 512, with what is between them.
LEAD_TOKENS = 544
# How the names of means begin, and of contexts with the same passages before every chunk.
MEAN, _FIXED = "mean:", "fixed:"


@dataclass(frozen=True)
class Context:
    """Passages that stand before a chunk while it is encoded. Their own KV is not kept with it.

    Attributes:
        name: part of the KV's identity, so different contexts need different names.
        before: gives the passages for a chunk's text; the last one stands right before the chunk.
            If the model's context has no room for all, the first ones are left out.
        others: contexts that a chunk is encoded in, too; its KV is the mean of all of these.
    """

    name: str
    before: Callable[[str], Sequence[str]]
    others: tuple[Context, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether it has the same passages before every chunk."""
        return self.name.startswith((_FIXED, MEAN))

    @property
    def ways(self) -> tuple[Context, ...]:
        """Itself and the others: how often a chunk is encoded."""
        return (self, *self.others)

    @classmethod
    def fixed(cls, *passages: str) -> Context:
        """A context with the same passages before every chunk."""
        return cls(f"{_FIXED}{digest(*passages, 'an empty line after each')}", lambda _: passages)

    @classmethod
    def mean(cls, *contexts: Context) -> Context:
        """A context in which a chunk's KV is the mean of that in each of these, moved to one place.

        What a text before a chunk adds to its KV is in part the same for any text, and in part that
        text's own, which another prompt does not have: the mean keeps the former and loses most of
        the latter. From no paper; docs/quality.md has what it gives.

        Raises:
            ConfigError: none is given, or one of them is a mean itself.
        """
        if not contexts or any(one.others for one in contexts):
            raise ConfigError("a mean is of one context at least, and none of them a mean itself")
        first, *others = contexts
        if not others:
            return first
        name = f"{MEAN}{digest(*(one.name for one in contexts))}"
        return cls(name, first.before, tuple(others))


# Each is four short passages about nothing in particular. They are the same for all chunks, so
# their own KV is computed once.
_TEXT = resources.files("cached_rag.library").joinpath("primers.txt").read_text(encoding="utf-8")
_PRIMERS = tuple(Context.fixed(*one.strip().split("\n\n")) for one in _TEXT.split("\n---\n"))


def primer(count: int = 1) -> Context:
    """The mean of so many primers; each takes a pass over every chunk.

    Raises:
        ConfigError: there are not so many.
    """
    if not 1 <= count <= MOST_PRIMERS:
        raise ConfigError(f"there are 1 to {MOST_PRIMERS} primers, not {count}")
    return Context.mean(*_PRIMERS[:count])


PRIMER = primer()


@dataclass(frozen=True)
class EncodeSummary:
    """What a call of `Engine.encode` did.

    Attributes:
        encoded: number of chunks that were prefilled.
        present: number of chunks whose KV was kept already, behind each of the contexts.
        skipped: (text, reason) of each text that cannot be a chunk.
        tokens: number of tokens that were prefilled, in all passes.
        seconds: how long it took.
        unsent: number of KVs that are kept here, but could not be sent to the remote store; if the
            same texts are encoded again, they are sent again.
    """

    encoded: int = 0
    present: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    unsent: int = 0

    def __add__(self, other: EncodeSummary) -> EncodeSummary:
        pairs = ((getattr(one, f.name) for one in (self, other)) for f in fields(self))
        return EncodeSummary(*(mine + its for mine, its in pairs))


def join(model: Backend, base: ModuleKV | None, chunk: ModuleKV) -> ModuleKV:
    """One KV made of two: `base`, and the chunk's KV moved to right behind it.

    Args:
        base: starts at position 0; None for nothing before the chunk.

    Raises:
        RelocationError: the chunk has to be moved, and the model's keys cannot be.
    """
    if base is None:
        return chunk
    length = base.seq_len + chunk.seq_len
    model.rule.check(base.seq_len - chunk.start, length)
    buffer = KVBuffer.like(model.shapes, length)
    buffer.place(base, 0, _IN_PLACE)
    buffer.place(chunk, base.seq_len, model.rule)
    return buffer.read(0, length, base.token_ids + chunk.token_ids)


def encode_chunks(
    model: Backend, prefixes: Sequence[ModuleKV | None], chunks: Sequence[Ids]
) -> Iterator[ModuleKV]:
    """Prefill chunks, each alone behind each of the prefixes in turn.

    Args:
        prefixes: KV that starts at position 0; None for no prefix.
        chunks: the token ids of each.

    Yields:
        The KV of each chunk, without the prefix's: of several prefixes the mean, at the place that
        the first one gives it. The longest chunk first.

    Raises:
        ContextOverflowError: see `check_fits`.
        RelocationError: there are several prefixes, and the model's keys cannot be moved.
    """
    starts = [prefix.seq_len if prefix else 0 for prefix in prefixes]
    for batch in batches(chunks):
        check_fits(model, max(starts), len(batch[0]))
        model.rule.check(max(starts) - min(starts), 0)
        found = [list(_encode_batch(model, prefix, batch)) for prefix in prefixes]
        yield from (_mean(kvs, model.rule) for kvs in zip(*found, strict=True))


def _mean(kvs: Sequence[ModuleKV], rule: PositionRule) -> ModuleKV:
    """The mean of one chunk's KV from several places, computed in fp32, where the first one is."""
    first, *others = kvs
    if not others:
        return first

    def mean(of: Literal["keys", "values"]) -> Layered:
        total: Layered = getattr(first, of).to(torch.float32, copy=True)
        for kv in others:
            moved = each(total, torch.empty_like)
            rule.relocate(getattr(kv, of), first.start - kv.start, moved, of=of)
            for stack, added in zip(stacks_of(total), stacks_of(moved), strict=True):
                stack += added
        return each(total, lambda stack: (stack / len(kvs)).to(first.keys.dtype))

    return ModuleKV(first.token_ids, first.start, mean("keys"), mean("values"))


def check_fits(model: Backend, start: int, length: int, text: str = "") -> None:
    """Check that a chunk of `length` tokens fits behind a prefix of `start` tokens.

    Raises:
        ContextOverflowError: they exceed the model's context, or the length at which it switches to
            other frequencies.
    """
    if start + length > model.context_length:
        room = f"the model's context of {model.context_length}"
    elif model.rule.limit is not None and start + length > model.rule.limit:
        room = f"{model.rule.limit} tokens, where this model's rotation changes"
    else:
        return
    raise ContextOverflowError(
        f"a chunk of {length} tokens{named(text)} behind a prefix of {start} exceeds {room}; split "
        "it into smaller chunks"
    )


def check_known(model: Backend, token_ids: Sequence[int], what: str) -> None:
    """Check that the model has an embedding for each token: a GPU would be lost to the process.

    Gemma 3's smaller models have none for the token that stands for an image.

    Args:
        what: has these tokens; for the message.

    Raises:
        ConfigError: it has none for some.
    """
    last = max(token_ids, default=0)
    if last >= model.vocab_size:
        raise ConfigError(
            f"{what} has the token {model.tokenizer.decode([last])!r}, which is in the tokenizer, "
            f"and for which {model.name} has no embedding; leave it out, or load the model with "
            "its own tokenizer"
        )


def named(text: str) -> str:
    """The beginning of a text, by which its owner finds it; nothing if it is not known."""
    return f" ({text[:_NAMING]!r}...)" if text else ""


def encode_composed(
    model: Backend, before: Sequence[int], chunks: Sequence[Ids]
) -> Iterator[ModuleKV]:
    """KV of chunks, each alone behind some tokens, with what they do to states; see `Composer`.

    Args:
        before: tokens from position 0 on.
        chunks: of more than `SHORTEST_COMPOSED` tokens.

    Raises:
        ContextOverflowError: see `check_fits`.
        ModelError: what they do cannot be kept.
    """
    assert model.composer is not None
    start, kv = len(before), None
    base = KVBuffer.like(model.shapes, max(1, start))
    if before:
        model.prefill(base, torch.tensor([before]), num_logits=0)
        kv = base.read(0, start, tuple(before))
    for ids in chunks:
        check_fits(model, start, len(ids))
        buffer = KVBuffer.like(model.shapes, start + len(ids))
        if kv is not None:
            buffer.place(kv, 0, _IN_PLACE)
        buffer.states = base.states and base.states.copy()
        whole = torch.tensor([(*before, *ids)])
        begin, end = start + COMPOSE_ANCHORS, start + len(ids) - MAX_TRIM
        model.prefill(buffer, whole[:, :begin], torch.arange(start, begin), num_logits=0)
        packed = model.composer.compute(buffer, whole[:, :end], torch.arange(begin, end))
        model.prefill(buffer, whole, torch.arange(end, whole.shape[1]), num_logits=0)
        change = Change(COMPOSE_ANCHORS, end - start, packed)
        yield replace(buffer.read(start, start + len(ids), ids), change=change)


def _encode_batch(model: Backend, prefix: ModuleKV | None, batch: list[Ids]) -> Iterator[ModuleKV]:
    """KV of a batch, by one forward pass. The first chunk is the longest.

    Shorter ones are padded behind their end, where causal attention keeps the padding out.
    """
    start = prefix.seq_len if prefix else 0
    length = start + len(batch[0])
    buffer = KVBuffer.like(model.shapes, length, batch=len(batch))
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    for row, ids in enumerate(batch):
        tokens[row, start : start + len(ids)] = torch.tensor(ids)
    if prefix:
        buffer.place(prefix, 0, _IN_PLACE)
    model.prefill(buffer, tokens, torch.arange(start, length), num_logits=0)
    for row, ids in enumerate(batch):
        yield buffer.read(start, start + len(ids), ids, row)


def batches(chunks: Sequence[Ids]) -> Iterator[list[Ids]]:
    """Batches of chunks of similar length, longest first."""
    batch: list[Ids] = []
    for ids in sorted(chunks, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


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
        """The KV of each chunk; of several prefixes the mean. Errors as `encode_chunks`."""
        places: list[int] = []
        whole: list[int] = []
        for ids in (*self.lead, *self.chunks):
            whole += self.between if whole else ()
            places.append(len(whole))
            whole += ids
        (kv,) = encode_chunks(model, prefixes, [tuple(whole)])
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
