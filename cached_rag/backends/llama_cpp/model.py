"""A GGUF that llama.cpp runs, as a backend: the engine's KV goes in, tokens are computed, KV out.

llama.cpp appends tokens to sequences and does nothing else. So a prompt whose cached KV has gaps
(the tokens that are computed) is put together run by run: all cached KV goes into one sequence;
another one takes it up to the first gap, computes the gap's tokens, takes on, and so to the end.
Each computed token then sees exactly what stands before it. Knows KV; knows no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from cached_rag.backends.base import Chosen, Prefilled, StepInput
from cached_rag.backends.llama_cpp.context import MAX_SEQUENCES, Context, FullError, Work
from cached_rag.backends.llama_cpp.residents import Residents
from cached_rag.backends.llama_cpp.state import runs_of
from cached_rag.backends.transformers.memory import free_bytes
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.positions import PositionRule
from cached_rag.kv.rows import RowKV
from cached_rag.methods import name_of
from cached_rag.methods.base import Layout, Selector

# Rows of one call: a sequence each, and some more are needed besides.
_MOST_ROWS = MAX_SEQUENCES // 2
# A context is made larger by one part in so many than is needed at once.
_SLACK = 4
Runs = Sequence[tuple[int, int]]
T = TypeVar("T")


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that llama.cpp has loaded; implements `Backend`. See `loading.py`.

    Attributes:
        about: what runs it.
        The others: see `Backend`.
    """

    name: str
    context: Context
    tokenizer: Any
    shapes: KVShapes
    rule: PositionRule
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    weights_bytes: int
    about: str
    token_price: float
    residents: Residents = field(init=False, compare=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    repetition_penalty: float = 1.0
    can_watch: bool = False
    can_narrow: bool = False
    can_batch: bool = True
    can_share: bool = False
    can_append: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", Residents(self.context))

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
                f"{name_of(method)} looks into the model's layers, and llama.cpp does not show "
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
        positions = [buffer.position(slot) for slot in range(slots[-1] + 1)]
        runs = _without_gaps(runs_of(slots), positions)

        def compute() -> torch.Tensor:
            self.context.require(slots[-1] + 1)
            with self._sequence() as own:
                with self._known(buffer, row, positions, runs, own) as known:
                    logits = self._compute(
                        known, own, buffer, row, ids, positions, runs, num_logits
                    )
                if buffer.keys.shape[1] == 1:
                    self.residents.add(buffer, own, slots[-1] + 1)
                return logits

        return self._retried(compute)

    @contextmanager
    def _known(
        self, buffer: KVBuffer, row: int, positions: Sequence[int], runs: Runs, heir: int
    ) -> Iterator[int | None]:
        """Inside this context, a sequence has all KV that is not computed; None if all is.

        Args:
            heir: the sequence that has taken all of it when the context ends.
        """
        begins, ends = [0, *(end for _, end in runs)], [begin for begin, _ in runs]
        spans = [span for span in zip(begins, ends, strict=False) if span[0] < span[1]]
        if not spans:
            yield None
            return
        number = self.context.open()
        try:
            parts = [
                (buffer.keys[:, row, :, begin:end], buffer.values[:, row, :, begin:end])
                for begin, end in spans
            ]
            at = [position for begin, end in spans for position in positions[begin:end]]
            self.context.put(number, at, parts)
            yield number
        finally:
            self.context.drop(number, heir)

    def _compute(
        self,
        known: int | None,
        own: int,
        buffer: KVBuffer,
        row: int,
        ids: Sequence[int],
        positions: Sequence[int],
        runs: Runs,
        num_logits: int,
    ) -> torch.Tensor:
        """Fill a sequence with what is known and what is computed now, in turns."""
        done, left = 0, sum(end - begin for begin, end in runs)
        found, unread = [], list[tuple[int, int]]()
        for begin, end in runs:
            if known is not None and done < begin:
                self.context.take(known, own, positions[done], positions[begin - 1] + 1)
            if begin and (gap := positions[begin] - positions[begin - 1] - 1):
                self._read(own, buffer, row, positions, unread)
                self.context.relabel(own, gap)
                unread = []
            left -= end - begin
            wanted = min(end - begin, max(0, num_logits - left))
            work = Work(own, ids[begin:end], positions[begin], wanted)
            found.append(self.context.compute([work]))
            unread.append((begin, end))
            done = end
        self._read(own, buffer, row, positions, unread)
        return torch.cat(found)

    def _read(
        self, own: int, buffer: KVBuffer, row: int, positions: Sequence[int], runs: Runs
    ) -> None:
        """Write the KV of computed runs to the buffer."""
        if runs:
            spans = [(positions[begin], positions[end - 1] + 1) for begin, end in runs]
            keys, values = self.context.read(own, spans).part
            at = torch.tensor([slot for begin, end in runs for slot in range(begin, end)])
            buffer.keys[:, row].index_copy_(2, at, keys)
            buffer.values[:, row].index_copy_(2, at, values)

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
                span = kv.position(kv.length), kv.position(end - 1) + 1
                keys, values = self.context.read(sequence, [span]).part
                at = slice(kv.at(kv.length), kv.at(end))
                kv.own.keys[:, 0, :, at], kv.own.values[:, 0, :, at] = keys, values
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
            parts = [
                (
                    run.buffer.keys[:, 0, :, run.begin : run.end],
                    run.buffer.values[:, 0, :, run.begin : run.end],
                )
                for run in kv.every_run()
            ]
            self.context.put(number, [kv.position(slot) for slot in range(kv.length)], parts)
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


def _without_gaps(runs: Runs, positions: Sequence[int]) -> Runs:
    """Runs of slots, cut where positions are left out."""
    found: list[tuple[int, int]] = []
    for begin, end in runs:
        for slot in range(begin, end):
            if slot > begin and positions[slot] == positions[slot - 1] + 1:
                found[-1] = (found[-1][0], slot + 1)
            else:
                found.append((slot, slot + 1))
    return found
