"""Prefills chunks ahead of time, in batches, behind a prefix. Takes token ids, gives KV.

Knows no prompt, no method and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import ContextOverflowError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.positions import PositionRule

# Tokens in a batch, padding included: enough to keep the cores busy, and few enough that the batch
# stays in their caches.
BATCH_TOKENS = 2048
_IN_PLACE = PositionRule()
_NAMING = 40
OnBatch = Callable[[int, int], object]


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
        return EncodeSummary(
            self.encoded + other.encoded,
            self.present + other.present,
            (*self.skipped, *other.skipped),
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.unsent + other.unsent,
        )


def encode_prefix(model: Backend, prefix_ids: Sequence[int]) -> ModuleKV:
    """KV of a prefix that starts at position 0.

    Args:
        prefix_ids: its tokens.
    """
    ids = tuple(prefix_ids)
    buffer = KVBuffer.like(model.shapes, len(ids))
    model.prefill(buffer, torch.tensor([ids]), num_logits=0)
    return buffer.read(0, len(ids), ids)


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
    model: Backend,
    prefix: ModuleKV | None,
    chunks: Sequence[tuple[int, ...]],
    progress: OnBatch = lambda *_: None,
) -> Iterator[ModuleKV]:
    """Prefill chunks, each alone behind the prefix; see `encode_mean`."""
    return encode_mean(model, [prefix], chunks, progress)


def encode_mean(
    model: Backend,
    prefixes: Sequence[ModuleKV | None],
    chunks: Sequence[tuple[int, ...]],
    progress: OnBatch = lambda *_: None,
) -> Iterator[ModuleKV]:
    """Prefill chunks, each alone behind each of the prefixes in turn.

    Args:
        prefixes: KV that starts at position 0; None for no prefix.
        chunks: the token ids of each.
        progress: called after each batch with the numbers of its chunks and of the tokens computed.

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
        progress(len(batch), len(prefixes) * sum(map(len, batch)))


def _mean(kvs: Sequence[ModuleKV], rule: PositionRule) -> ModuleKV:
    """The mean of one chunk's KV from several places, computed in fp32, where the first one is."""
    first, *others = kvs
    if not others:
        return first
    keys, values = first.keys.float(), first.values.float()
    moved = torch.empty_like(keys)
    for kv in others:
        keys += rule.relocate(kv.keys, first.start - kv.start, moved)
        values += kv.values
    whole = (keys / len(kvs), values / len(kvs))
    return ModuleKV(first.token_ids, first.start, *(side.to(first.keys.dtype) for side in whole))


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


def named(text: str) -> str:
    """The beginning of a text, by which its owner finds it; nothing if it is not known."""
    return f" ({text[:_NAMING]!r}...)" if text else ""


def _encode_batch(
    model: Backend, prefix: ModuleKV | None, batch: list[tuple[int, ...]]
) -> Iterator[ModuleKV]:
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


def batches(chunks: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Batches of chunks of similar length, longest first."""
    batch: list[tuple[int, ...]] = []
    for ids in sorted(chunks, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch
