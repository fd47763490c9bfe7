"""A GGUF that llama.cpp runs, as a backend: the engine's KV goes in, tokens are computed, KV out.

A prompt is put together in a sequence of its own (`assembly.py`), and its answer goes on there. All
KV is in the engine's buffers; what is in the context is a copy. So a prompt can leave the context
at any time, and is put in anew when it goes on. Knows KV; knows no text.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from cached_rag.backends.base import Chosen, Prefilled, RepairInput, StepInput
from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.assembly import Assembly, calls, neighbours, part_of
from cached_rag.backends.llama_cpp.context import FullError, LlamaContext, Work
from cached_rag.backends.llama_cpp.residents import Owner, Residents, SequenceState
from cached_rag.backends.llama_cpp.watch import Attention
from cached_rag.backends.machine import free_bytes
from cached_rag.errors import ConfigError, ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes
from cached_rag.kv.positions import PositionRule
from cached_rag.kv.rows import RowKV
from cached_rag.methods import spelled
from cached_rag.methods.base import QuestionSelector

# A context is made larger by one part in so many than is needed at once.
_SLACK = 4
T = TypeVar("T")


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that llama.cpp has loaded; implements `Backend`. See `loading.py`.

    Attributes:
        weights_bytes, num_weights: of the weights.
        attention: what watches it; None if that is not possible.
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
    num_weights: int
    token_price: float
    attention: Attention | None
    residents: Residents = field(init=False, compare=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    # The same for every model, so no fields.
    repetition_penalty = 1.0
    can_share = False
    composer = None
    can_batch = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", Residents(self.context))

    @property
    def shapes(self) -> KVShapes:
        """See `Backend`."""
        return self.context.shapes

    @property
    def keeps_states(self) -> bool:
        """See `Backend`. So it is where the KV of single tokens is not taken out of a state."""
        return self.context.format is None

    @property
    def can_watch(self) -> bool:
        """See `Backend`."""
        return self.attention is not None

    @property
    def can_append(self) -> bool:
        """See `Backend`. Tokens that are taken back have moved sliding windows on."""
        return not self.keeps_states and not self.context.window

    @property
    def vocab_size(self) -> int:
        """See `Backend`."""
        return self.context.vocab_size

    @property
    def details(self) -> dict[str, object]:
        """See `Backend`."""
        return {
            "layers": f"llama.cpp ({api.PACKAGE} {api.BUILD})",
            "weights": "as stored",
            "weights_bytes": self.weights_bytes,
            "kv_cells": self.context.size,
        }

    def unpacked(self, data: torch.Tensor, length: int) -> SequenceState:
        """See `Backend`."""
        return SequenceState(self.context, -1, length, data)

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
        tails, at = [], wanted.tolist()
        for row, ids in enumerate(token_ids.tolist()):
            work = partial(self._prefill_row, buffer, row, ids, at, num_logits)
            if self.keeps_states:
                work = partial(self._read_on, buffer, ids, at, num_logits)
            tails.append(self._retried(work))
        computed = len(wanted) * self.shapes.num_layers
        return Prefilled(torch.stack(tails), computed, wanted)

    def repair(self, prompt: RepairInput) -> Prefilled:
        """See `Backend`. Tokens of one chunk that are computed in one call do not see each other's.

        Raises:
            ConfigError: the method chooses layer by layer, or watches attention that is not shown.
        """
        method, layout = prompt.method, prompt.layout
        asks = isinstance(method, QuestionSelector) and bool(method.observed_layers(layout))
        if method.check_layers(layout) or (asks and not self.can_watch):
            raise ConfigError(
                f"{spelled(method)} looks into the model's layers, and llama.cpp does not show "
                'them; use auto, epic, lexical, reuse, prefix or full, or backend="transformers"'
            )
        if prompt.ready is not None:
            for layer in range(self.shapes.num_layers):
                prompt.ready(layer)
        self.residents.remove(prompt.buffer)
        return self._retried(partial(self._repair, prompt))

    def _repair(self, prompt: RepairInput) -> Prefilled:
        """Choose what is computed, and put the prompt together."""
        buffer, layout, method = prompt.buffer, prompt.layout, prompt.method
        ids: list[int] = prompt.token_ids[0].tolist()
        rows, asked = method.first_rows(layout), 0
        if isinstance(method, QuestionSelector) and method.observed_layers(layout):
            rows = rows | self._ask(prompt, ids, method)
            asked = len(ids) - layout.question
        slots = rows.nonzero().squeeze(1)
        self.context.require(len(ids) + len(slots))
        with self._sequence() as own:
            assembly = Assembly(self.context, own, buffer, ids, layout.fresh)
            *others, last = calls(neighbours(slots.tolist(), assembly.positions), layout)
            for call in others:
                if call.chunk is None:
                    assembly.append(call.runs[0])
                else:
                    assembly.repair(call, moves=method.transfers_drift)
            logits = assembly.append(last.runs[0], prompt.num_logits)
            self.residents.add(buffer, own, len(ids))
        return Prefilled(logits[None], (asked + len(slots)) * self.shapes.num_layers, slots)

    def _ask(self, prompt: RepairInput, ids: list[int], method: QuestionSelector) -> torch.Tensor:
        """(seq_len,) bool: what the question chooses, over the KV that the buffer has.

        Other tokens without KV are left out. Most are what joins two chunks.
        """
        assert self.attention is not None
        buffer, layout = prompt.buffer, prompt.layout
        with self._sequence() as own, self.attention.watched(method, layout) as scores:
            asking = Assembly(self.context, own, buffer, ids, layout.fresh)
            asking.append((layout.question, len(ids)))
        return method.choose(scores(buffer), layout)

    def choose(self, *_: object, **__: object) -> Chosen | None:
        """See `Backend`: never, as pieces of a repair would have to be appended."""
        return None

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """See `Backend`."""
        most = self.context.max_sequences // 2  # some sequences are needed besides
        parts = [batch[at : at + most] for at in range(0, len(batch), most)]
        logits = [self._retried(partial(self._step, part)) for part in parts]
        for ahead in batch:
            ahead.kv.length = ahead.end
        return torch.cat(logits)

    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """See `Backend`."""
        rows = [partial(self._forward, ids, split or 0) for ids in token_ids.tolist()]
        return torch.stack([self._retried(row) for row in rows])

    def _forward(self, ids: Sequence[int], split: int) -> torch.Tensor:
        with self._sequence() as own:
            if split:
                self.context.compute([Work(own, ids[:split], 0, 0)])
            return self.context.compute([Work(own, ids[split:], split)])[0]

    # One prompt ------------------------------------------------------------------------------

    def _prefill_row(
        self, buffer: KVBuffer, row: int, ids: Sequence[int], slots: Sequence[int], num_logits: int
    ) -> torch.Tensor:
        """Compute one prompt's tokens at `slots`, and write their KV to the buffer."""
        self.residents.remove(buffer)
        end = slots[-1] + 1
        self.context.require(end)
        with self._sequence() as own:
            assembly = Assembly(self.context, own, buffer, ids[:end], row=row)
            logits = assembly.fill(slots, num_logits)
            if buffer.batch == 1:
                self.residents.add(buffer, own, end)
            return logits

    def _read_on(
        self, buffer: KVBuffer, ids: Sequence[int], slots: Sequence[int], num_logits: int
    ) -> torch.Tensor:
        """Compute a prompt's last tokens behind the state of those before them."""
        begin = slots[0]
        if buffer.batch > 1 or buffer.positions is not None or len(slots) != len(ids) - begin:
            raise ModelError(
                "llama.cpp keeps this model's states as a whole, so a prompt's tokens are computed "
                'one after the other, without gaps; use full or prefix, or backend="transformers"'
            )

        if not begin:
            self.residents.remove(buffer)
            buffer.states = None
        sequence = self._resident(buffer, buffer, begin)
        work = Work(sequence, ids[begin:], begin, num_logits)
        return self._appended([buffer], [buffer], [work])

    # Answers ---------------------------------------------------------------------------------

    def _step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """Append tokens to the rows of a batch, and write their KV to the rows' buffers."""
        self.residents.sweep()
        rows = [ahead.kv for ahead in batch]
        try:
            sequences = [self._resident(kv, kv.own, kv.length) for kv in rows]
            work = [
                Work(number, ahead.token_ids, kv.position(kv.length), ahead.num_logits)
                for number, kv, ahead in zip(sequences, rows, batch, strict=True)
            ]
            if self.keeps_states:
                return self._appended(rows, [kv.own for kv in rows], work)
            logits = self.context.compute(work)
            for sequence, ahead in zip(sequences, batch, strict=True):
                kv, end = ahead.kv, ahead.end
                part = part_of(kv.own, kv.at(kv.length), kv.at(end))
                self.context.read(sequence, kv.position(kv.length), part)
                self.residents.add(kv, sequence, end)
        except BaseException:  # what is in the context may be more than the rows' lengths say
            for kv in rows:
                self.residents.remove(kv)
            raise
        return logits

    def _appended(
        self, owners: Sequence[Owner], buffers: Sequence[KVBuffer], work: Sequence[Work]
    ) -> torch.Tensor:
        """Append tokens to sequences whose states are kept as a whole; the states go on with them.

        What fails on the way leaves the states that were taken out before, if there are any.
        """
        self.context.require(sum(len(one.token_ids) for one in work))
        try:
            logits = self.context.compute(work)
        except BaseException:
            for owner, buffer in zip(owners, buffers, strict=True):
                if buffer.states is not None and not buffer.states.nbytes:
                    buffer.states = None  # it was in the context only, which may have gone on
                self.residents.remove(owner)
            raise
        for owner, buffer, one in zip(owners, buffers, work, strict=True):
            end = one.position + len(one.token_ids)
            self.residents.add(owner, one.sequence, end)
            buffer.states = self.residents.state(one.sequence, end)
        return logits

    def _resident(self, owner: Owner, buffer: KVBuffer, length: int) -> int:
        """The sequence that has a prompt's first tokens and no others; if need be, put in."""
        found = self.residents.of(owner)
        if found is not None and found.length == length:
            return found.sequence
        if found is not None and found.length > length and not self.keeps_states:
            self.context.cut(found.sequence, owner.position(length), found.length - length)
            found.length = length
            return found.sequence
        self.residents.remove(owner)
        number = self.context.open()
        try:
            if not self.keeps_states:
                assert isinstance(owner, RowKV)
                self._put_in(owner, number)
            elif length:
                self._restore(buffer, number, length)
        except BaseException:
            self.context.drop(number)
            raise
        self.residents.add(owner, number, length)
        return number

    def _put_in(self, kv: RowKV, sequence: int) -> None:
        for run in kv.every_run():
            positions = [kv.position(run.slot + n) for n in range(run.end - run.begin)]
            self.context.put(sequence, positions, part_of(run.buffer, run.begin, run.end))

    def _restore(self, buffer: KVBuffer, sequence: int, length: int) -> None:
        states = buffer.states
        if not isinstance(states, SequenceState) or states.length != length:
            raise ModelError(f"the state before token {length} is not there")
        self.context.restore(sequence, states.packed(), length)

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
        each, now = self.context.bytes_per_token, self.context.size
        return cells > now and cells * each <= (free_bytes("cpu") + now * each) // 2
