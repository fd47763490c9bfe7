"""A GGUF that llama.cpp runs, as a backend: the engine's KV goes in, tokens are computed, KV out.

llama.cpp appends tokens to sequences and does nothing else. So a prompt is put together from its
first token to its last, run by run: KV from the buffer up to the next gap, the gap's tokens
computed, and so on. Each computed token then sees exactly what stands before it. The answer goes on
in the same sequence.

All KV is in the engine's buffers; what is in the context is a copy. So a prompt can leave the
context at any time, and is put in anew when it goes on. Knows KV; knows no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from cached_rag.backends.base import Chosen, Prefilled, StepInput
from cached_rag.backends.llama_cpp.context import MAX_SEQUENCES, FullError, LlamaContext, Part, Work
from cached_rag.backends.machine import free_bytes
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes, even
from cached_rag.kv.positions import PositionRule
from cached_rag.kv.rows import RowKV
from cached_rag.methods import spelled
from cached_rag.methods.base import Layout, Selector

Run = tuple[int, int]  # begin and end (exclusive) of neighbouring slots
Owner = KVBuffer | RowKV
# Rows of one call: a sequence each, and some more are needed besides.
_MOST_ROWS = MAX_SEQUENCES // 2
# A context is made larger by one part in so many than is needed at once.
_SLACK = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch, and which of its tokens are computed.

    Attributes:
        buffer: has the KV of the others, and gets that of the computed ones.
        row: which prompt of the buffer it is.
        ids: of all its tokens.
        slots: of the tokens to compute, ascending. What follows the last of them is left out.
    """

    buffer: KVBuffer
    row: int
    ids: Sequence[int]
    slots: Sequence[int]

    @property
    def length(self) -> int:
        """How many slots it has in the sequence in the end."""
        return self.slots[-1] + 1

    def compose(self, context: LlamaContext, sequence: int, num_logits: int) -> torch.Tensor:
        """Fill an empty sequence, and write the KV of the computed tokens to the buffer.

        Returns:
            (num_logits, vocab_size) logits of the last tokens.

        Raises:
            FullError: the context has too few free cells.
        """
        context.require(self.length)
        positions = [self.buffer.position(slot) for slot in range(self.length)]
        done, left, found = 0, len(self.slots), []
        for begin, end in neighbours(self.slots, positions):
            if done < begin:
                keys, values = self._room(done, begin)
                context.put(sequence, positions[done:begin], keys, values)
            if begin and (gap := positions[begin] - positions[begin - 1] - 1):
                context.relabel(sequence, gap)
            left -= end - begin
            wanted = min(end - begin, max(0, num_logits - left))
            work = Work(sequence, self.ids[begin:end], positions[begin], wanted)
            found.append(context.compute([work]))
            context.read(sequence, positions[begin], *self._room(begin, end))
            done = end
        return torch.cat(found)

    def _room(self, begin: int, end: int) -> Part:
        """Views of some slots' keys and values."""
        keys, values = even(self.buffer.keys), even(self.buffer.values)
        return keys[:, self.row, :, begin:end], values[:, self.row, :, begin:end]


def neighbours(slots: Sequence[int], positions: Sequence[int]) -> list[Run]:
    """Ascending slots as runs without gaps, neither of slots nor of positions.

    Args:
        positions: of all slots, from the first.
    """
    runs: list[Run] = []
    for slot in slots:
        follows = bool(runs) and runs[-1][1] == slot and positions[slot] == positions[slot - 1] + 1
        runs[-1:] = [(runs[-1][0], slot + 1)] if follows else [*runs[-1:], (slot, slot + 1)]
    return runs


@dataclass
class Resident:
    """A prompt in the context.

    Attributes:
        sequence: where it is.
        length: how many of its slots are there, from the first.
        used: when it was used last, as a count of uses.
    """

    sequence: int
    length: int
    used: int


class Residents:
    """The prompts in one context, by the buffer that holds them, or by their `RowKV`."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._found: WeakKeyDictionary[Owner, Resident] = WeakKeyDictionary()
        self._sequences: dict[int, ref[Owner]] = {}
        self._uses = 0

    def add(self, owner: Owner, sequence: int, length: int) -> None:
        """Note that a prompt's first `length` slots are in a sequence."""
        self._uses += 1
        self._found[owner] = Resident(sequence, length, self._uses)
        self._sequences[sequence] = ref(owner)

    def has(self, sequence: int) -> bool:
        """Whether somebody resides in a sequence."""
        return sequence in self._sequences

    def of(self, kv: RowKV) -> Resident | None:
        """The resident that has a row's KV; None if it is not in the context.

        A prompt is prefilled into a buffer, and then goes on as a row that has it.
        """
        found = self._found.get(kv)
        if found is None and not kv.runs and (found := self._found.pop(kv.own, None)) is not None:
            self._found[kv] = found
            self._sequences[found.sequence] = ref(kv)
        if found is not None:
            self._uses += 1
            found.used = self._uses
        return found

    def remove(self, owner: Owner) -> None:
        """Drop a prompt's sequence, if it is there."""
        found = self._found.pop(owner, None)
        if found is not None:
            self._sequences.pop(found.sequence)
            self._context.drop(found.sequence)

    def sweep(self) -> bool:
        """Drop the sequences of prompts that are over; False if there are none."""
        over = [number for number, owner in self._sequences.items() if owner() is None]
        for number in over:
            del self._sequences[number]
            self._context.drop(number)
        return bool(over)

    def make_room(self) -> bool:
        """Drop what is over, or else the prompt that waits for longest; False if there is none."""
        if self.sweep():
            return True
        found = [(one.used, owner) for owner, one in self._found.items()]
        if not found:
            return False
        self.remove(min(found, key=lambda pair: pair[0])[1])
        return True

    def clear(self) -> None:
        """Forget all, as the context is gone."""
        self._found.clear()
        self._sequences.clear()


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that llama.cpp has loaded; implements `Backend`. See `loading.py`.

    Attributes:
        about: what runs it.
        The others: see `Backend`.
    """

    name: str
    context: LlamaContext
    tokenizer: Any
    rule: PositionRule
    fingerprint: str
    context_length: int
    eos_ids: frozenset[int]
    weights_bytes: int
    about: str
    token_price: float
    residents: Residents = field(init=False, compare=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    # The same for every model, so no fields.
    repetition_penalty = 1.0
    can_watch = can_narrow = can_share = keeps_states = False
    can_batch = can_append = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", Residents(self.context))

    @property
    def shapes(self) -> KVShapes:
        """See `Backend`."""
        return self.context.shapes

    @property
    def vocab_size(self) -> int:
        """See `Backend`."""
        return self.context.vocab_size

    @property
    def details(self) -> dict[str, object]:
        """See `Backend`."""
        return {
            "layers": self.about,
            "weights": "as stored",
            "weights_bytes": self.weights_bytes,
            "kv_cells": self.context.size,
        }

    def prefill(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        num_logits: int = 1,
    ) -> Prefilled:
        """See `Backend`. All prompts of a batch have the KV before the first computed token."""
        wanted = torch.arange(token_ids.shape[1]) if slots is None else slots.cpu()
        tails = []
        for row in range(len(token_ids)):
            ids = token_ids[row].tolist()
            tails.append(self._prefill_row(buffer, row, ids, wanted.tolist(), num_logits))
        computed = len(wanted) * self.shapes.num_layers
        return Prefilled(torch.stack(tails), computed, wanted)

    def repair(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        layout: Layout,
        method: Selector,
        ready: Callable[[int], object] | None = None,
    ) -> Prefilled:
        """See `Backend`.

        Raises:
            ModelError: the method watches layers, or moves what it does not compute.
        """
        looks = method.check_layers(layout) or hasattr(method, "observed_layers")
        if looks or method.transfers_drift:
            raise ModelError(
                f"{spelled(method)} looks into the model's layers, and llama.cpp does not show "
                'them; use auto, epic, reuse, prefix or full, or backend="transformers"'
            )
        if ready is not None:
            for layer in range(self.shapes.num_layers):
                ready(layer)
        return self.prefill(buffer, token_ids, method.first_rows(layout).nonzero().squeeze(1))

    def choose(self, *_: object, **__: object) -> Chosen | None:
        """See `Backend`: never, as pieces of a repair would have to be appended."""
        return None

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """See `Backend`."""
        parts = [batch[at : at + _MOST_ROWS] for at in range(0, len(batch), _MOST_ROWS)]
        logits = [self._retried(partial(self._step, part)) for part in parts]
        for ahead in batch:
            ahead.kv.length = ahead.end
        return torch.cat(logits)

    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """See `Backend`."""
        return torch.stack([self._forward(ids, split) for ids in token_ids.tolist()])

    def _forward(self, ids: Sequence[int], split: int | None) -> torch.Tensor:
        def compute() -> torch.Tensor:
            with self._sequence() as own:
                if split:
                    self.context.compute([Work(own, ids[:split], 0, 0)])
                return self.context.compute([Work(own, ids[split or 0 :], split or 0)])[0]

        return self._retried(compute)

    # One prompt ------------------------------------------------------------------------------

    def _prefill_row(
        self, buffer: KVBuffer, row: int, ids: Sequence[int], slots: Sequence[int], num_logits: int
    ) -> torch.Tensor:
        """Compute one prompt's tokens at `slots`, and write their KV to the buffer."""
        self.residents.remove(buffer)
        prompt = Prompt(buffer, row, ids, slots)

        def compute() -> torch.Tensor:
            with self._sequence() as own:
                logits = prompt.compose(self.context, own, num_logits)
                if buffer.batch == 1:
                    self.residents.add(buffer, own, prompt.length)
                return logits

        return self._retried(compute)

    # Answers ---------------------------------------------------------------------------------

    def _step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """Append tokens to the rows of a batch, and write their KV to the rows' buffers."""
        self.residents.sweep()
        rows = [ahead.kv for ahead in batch]
        try:
            sequences = [self._resident(kv) for kv in rows]
            logits = self.context.compute(
                [
                    Work(
                        sequence,
                        ahead.token_ids,
                        ahead.kv.position(ahead.kv.length),
                        ahead.num_logits,
                    )
                    for sequence, ahead in zip(sequences, batch, strict=True)
                ]
            )
            for sequence, ahead in zip(sequences, batch, strict=True):
                kv, end = ahead.kv, ahead.end
                room = slice(kv.at(kv.length), kv.at(end))
                keys, values = (even(side)[:, 0, :, room] for side in (kv.own.keys, kv.own.values))
                self.context.read(sequence, kv.position(kv.length), keys, values)
                self.residents.add(kv, sequence, end)
        except BaseException:  # what is in the context may be more than the rows' lengths say
            for kv in rows:
                self.residents.remove(kv)
            raise
        return logits

    def _resident(self, kv: RowKV) -> int:
        """The sequence that has a row's KV and nothing else; it is put in if it is not there."""
        found = self.residents.of(kv)
        if found is not None and found.length >= kv.length:
            if found.length > kv.length:
                behind = found.length - kv.length
                self.context.cut(found.sequence, kv.position(kv.length), behind)
                found.length = kv.length
            return found.sequence
        self.residents.remove(kv)
        number = self.context.open()
        try:
            for run in kv.every_run():
                positions = [kv.position(run.slot + n) for n in range(run.end - run.begin)]
                at = slice(run.begin, run.end)
                sides = (even(side)[:, 0, :, at] for side in (run.buffer.keys, run.buffer.values))
                self.context.put(number, positions, *sides)
        except BaseException:
            self.context.drop(number)
            raise
        self.residents.add(kv, number, kv.length)
        return number

    # Room ------------------------------------------------------------------------------------

    @contextmanager
    def _sequence(self) -> Iterator[int]:
        """A new sequence, which is dropped if nobody resides in it when the context ends."""
        self.residents.sweep()
        number = self.context.open()
        try:
            yield number
        finally:
            if not self.residents.has(number):
                self.context.drop(number)

    def _retried(self, work: Callable[[], T]) -> T:
        """Do work that may need more cells than there are: make the context larger, or room in it.

        Work that fails leaves no sequence behind.

        Raises:
            ModelError: there is no memory for that.
        """
        if not self.context.size:
            self.context.resize(0)
        while True:
            try:
                return work()
            except FullError as error:
                cells = error.cells + error.cells // _SLACK
            if cells and self._has_memory(cells):
                self.residents.clear()
                self.context.resize(cells)
            elif not self.residents.make_room():
                raise ModelError(
                    "llama.cpp's context cannot be made large enough for these prompts; free some "
                    "memory, or ask shorter prompts, or fewer at the same time "
                    "(BatchConfig.max_rows)"
                )

    def _has_memory(self, cells: int) -> bool:
        """Whether a context of so many cells leaves at least as much memory as it takes."""
        each, now = self.shapes.bytes_per_token, self.context.size
        return cells > now and cells * each <= (free_bytes("cpu") + now * each) // 2
