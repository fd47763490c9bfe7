"""Prefills modules ahead of time, in batches, each behind a prefix.

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

# A batch is large enough to keep the cores busy and small enough to stay in their caches.
BATCH_TOKENS = 2048
_IN_PLACE = PositionRule()
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class EncodeSummary:
    """What an encoding run did.

    Attributes:
        encoded: modules prefilled now.
        present: modules whose KV was there already.
        skipped: (text, reason) of those that cannot be modules.
        tokens: prefilled now.
        seconds: it took.
    """

    encoded: int
    present: int
    skipped: tuple[tuple[str, str], ...]
    tokens: int
    seconds: float


def encode_prefix(model: Backend, prefix_ids: Sequence[int]) -> ModuleKV:
    """KV of a prefix at the start of a prompt."""
    ids = tuple(prefix_ids)
    buffer = KVBuffer.like(model.shapes, len(ids))
    model.prefill(buffer, torch.tensor([ids]), num_logits=0)
    return buffer.read(0, len(ids), ids)


def join(model: Backend, base: ModuleKV | None, module: ModuleKV) -> ModuleKV:
    """A KV and, moved right behind it, another: what a prompt of both would be assembled to.

    Raises:
        RelocationError: the module has to be moved and the model's keys cannot be.
    """
    if base is None:
        return module
    length = base.seq_len + module.seq_len
    model.rule.check(base.seq_len - module.start, length)
    buffer = KVBuffer.like(model.shapes, length)
    buffer.place(base, 0, _IN_PLACE)
    buffer.place(module, base.seq_len, model.rule)
    return buffer.read(0, length, base.token_ids + module.token_ids)


def encode_modules(
    model: Backend,
    prefix: ModuleKV | None,
    modules: Sequence[tuple[int, ...]],
    progress: Progress = lambda *_: None,
) -> Iterator[ModuleKV]:
    """KV of each module behind the prefix, longest modules first.

    Args:
        prefix: KV of the prefix, starting at 0; None for none.
        modules: token ids of each.
        progress: called after each batch with its number of modules, and of their tokens.

    Raises:
        ContextOverflowError: a module and the prefix exceed the model's context.
        RelocationError: they exceed the length at which the model's frequencies switch.
    """
    start = prefix.seq_len if prefix else 0
    for batch in _batches(modules):
        check_fits(model, start, len(batch[0]))
        model.rule.check(0, start + len(batch[0]))
        yield from _encode_batch(model, prefix, batch)
        progress(len(batch), sum(map(len, batch)))


def check_fits(model: Backend, start: int, length: int) -> None:
    """Whether a module of so many tokens can be encoded behind a prefix of `start` tokens.

    Raises:
        ContextOverflowError: they exceed the model's context.
    """
    if start + length > model.context_length:
        raise ContextOverflowError(
            f"a module of {length} tokens behind a prefix of {start} exceeds the model's context "
            f"of {model.context_length}; split it into smaller chunks"
        )


def _encode_batch(
    model: Backend, prefix: ModuleKV | None, batch: list[tuple[int, ...]]
) -> Iterator[ModuleKV]:
    """One forward pass; padding stands behind each module, where causal attention ignores it."""
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


def _batches(modules: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Modules of like length together, longest first."""
    batch: list[tuple[int, ...]] = []
    for ids in sorted(modules, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch
