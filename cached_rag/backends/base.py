"""The protocol of a backend: what the rest of the library needs of a loaded model.

A backend only computes. The engine decides which tokens are computed, for which request and in
which order; `kv` defines the buffers that hold keys and values. To add a backend, write a class
with the members of `Backend` and run the engine on it in `tests/backends/test_backends.py`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from cached_rag.backends.thread import on_model_thread
from cached_rag.kv.buffer import KVBuffer, States
from cached_rag.kv.layers import KVShapes
from cached_rag.kv.positions import PositionRule
from cached_rag.kv.rows import RowKV
from cached_rag.methods.base import Layout, Selector

T = TypeVar("T")


@dataclass(frozen=True)
class StepInput:
    """One row of a batch, that is, one running request, and the tokens it computes.

    Without `slots`, the tokens are new: they follow those whose KV is in `kv`, and `Backend.step`
    appends theirs. With `slots`, they are a prompt's that is repaired: the KV of all other tokens
    that they see lies in `kv.own` already, `kv` has no runs, and what `kv.length` says does not
    matter.

    Attributes:
        num_logits: how many of the last of these tokens to return logits for; 0 for none.
        slots: where in `kv` the tokens stand, ascending; None for behind the last one.
        drifting: (begin, end) slots of the modules whose other tokens are moved as those computed
            are (`Selector.transfers_drift`). All tokens of such a module that are computed at all
            are among these.
    """

    kv: RowKV
    token_ids: Sequence[int]
    num_logits: int = 1
    slots: Sequence[int] | None = None
    drifting: Sequence[tuple[int, int]] = ()

    @property
    def at(self) -> Sequence[int]:
        """The tokens' slots, ascending."""
        if self.slots is not None:
            return self.slots
        return range(self.kv.length, self.kv.length + len(self.token_ids))

    @property
    def end(self) -> int:
        """The slot behind the last of these tokens."""
        return self.at[-1] + 1


@dataclass(frozen=True)
class RepairInput:
    """A prompt with reused KV, and the method that says what of it is computed again.

    Attributes:
        buffer: holds the reused KV.
        token_ids: (1, seq_len) int64, the whole prompt.
        layout: which slots of `buffer` hold reused KV, and which of it is exact.
        method: chooses which tokens with reused KV are recomputed, and in which layers.
        ready: called with the index of each layer before the layer's KV in `buffer` is read; it
            waits until that KV is loaded. None if all KV is there.
        num_logits: how many of the last tokens to return logits for; none of them is reused.
    """

    buffer: KVBuffer
    token_ids: torch.Tensor
    layout: Layout
    method: Selector
    ready: Callable[[int], object] | None = None
    num_logits: int = 1


@dataclass
class Prefilled:
    """The result of a prefill, in which a row is one token of the prompt, a slot its place in KV.

    Attributes:
        tail: (batch, num_logits, vocab_size) logits of the last rows.
        computed: how many (token, layer) pairs were computed; a layer in which a method checks
            rows counts with all the rows that it checks.
        rows: (num_rows,) slots whose keys and values were computed in every layer, ascending.
    """

    tail: torch.Tensor
    computed: int
    rows: torch.Tensor

    @property
    def logits(self) -> torch.Tensor:
        """(batch, vocab_size) logits of the last row."""
        return self.tail[:, -1]


@dataclass(frozen=True)
class Chosen:
    """Which rows of a prompt a method computes, chosen before they are.

    Attributes:
        rows: (num_rows,) slots of all rows that are computed in every layer, ascending.
        left: (num_left,) those that are not yet.
        computed: how many (token, layer) pairs were computed to choose them.
    """

    rows: torch.Tensor
    left: torch.Tensor
    computed: int


class Composer(Protocol):
    """Puts the states of layers together of what chunks do to them, in any order."""

    @property
    def rule(self) -> PositionRule:
        """How the keys of the other layers depend on position."""

    def compute(
        self, buffer: KVBuffer, token_ids: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """As `Backend.prefill` without logits, for tokens that follow the buffer's states.

        Returns:
            (num_bytes,) uint8, on the CPU: what the tokens do to states, for `behind`.

        Raises:
            ModelError: a layer's state does not change in a way that can be kept.
        """

    def behind(self, states: States, change: torch.Tensor, length: int) -> States:
        """The states behind tokens that stand elsewhere now, and are not computed again.

        Args:
            states: those before the tokens.
            change: what `compute` gave for them.
            length: how many tokens have been read then.
        """


class Backend(Protocol):
    """One loaded model.

    Callers hold `lock` while they use it. They call `prefill`, `repair`, `choose`, `step` and
    `forward` in a thread in which torch may compute (see `backends/thread.py`).
    """

    # Facts -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name it was loaded by."""

    @property
    def fingerprint(self) -> str:
        """Identifies the weights, configuration, tokenizer and dtype.

        Two models with the same fingerprint compute the same KV for the same tokens, so they share
        stored KV.
        """

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of the transformers library."""

    @property
    def vocab_size(self) -> int:
        """How many logits it gives for a position."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""

    @property
    def repetition_penalty(self) -> float:
        """The model's default repetition penalty; 1 for none."""

    @property
    def shapes(self) -> KVShapes:
        """Sizes, dtype and device of its keys and values."""

    @property
    def rule(self) -> PositionRule:
        """How its keys depend on position, and so whether they can be moved to another one."""

    @property
    def details(self) -> dict[str, object]:
        """What else is worth knowing of it, for `cached-rag doctor`, by name."""

    @property
    def lock(self) -> threading.Lock:
        """Callers hold it while they use the model, since several engines may share one."""

    # Abilities -------------------------------------------------------------------------------

    @property
    def can_watch(self) -> bool:
        """Whether `repair` accepts methods that watch which tokens the question attends to."""

    @property
    def can_batch(self) -> bool:
        """Whether `step` computes several rows in one pass."""

    @property
    def can_share(self) -> bool:
        """Whether rows of a step may share runs of KV, and repair prompts (`StepInput.slots`)."""

    @property
    def can_append(self) -> bool:
        """Whether `step` accepts more than one new token in a row."""

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state without a length (`KVBuffer.states`).

        Then `prefill` computes tokens that follow those of the states, or all, and nothing else;
        `repair` and `choose` are not called.
        """

    def unpacked(self, data: torch.Tensor, length: int) -> States:
        """States as `States.packed` gave them; asked for only where `keeps_states` is true.

        Args:
            data: (num_bytes,) uint8, on the CPU.
            length: how many tokens they have read.
        """

    @property
    def composer(self) -> Composer | None:
        """Puts states together of what chunks do to them; None if that cannot be done."""

    @property
    def num_weights(self) -> int:
        """How many weights it has, however few bits they are kept in."""

    @property
    def token_price(self) -> float:
        """The time of one more token in a step, as a share of the shortest step's; about."""

    # Computing -------------------------------------------------------------------------------

    def prefill(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        num_logits: int = 1,
    ) -> Prefilled:
        """Compute the tokens at `slots` in every layer, over the KV of all other tokens.

        Args:
            buffer: holds the KV of the tokens that are not computed.
            token_ids: (batch, seq_len) int64, the whole prompt.
            slots: (num_rows,) int64, ascending, which tokens to compute; None for all.
            num_logits: how many of the last computed tokens to return logits for; 0 for none.

        Effects: writes the KV of the computed tokens to `buffer`.
        """

    def repair(self, prompt: RepairInput) -> Prefilled:
        """Compute the tokens that have no KV, and those that a method chooses to recompute.

        Raises:
            ConfigError: the method needs an ability that the backend lacks.

        Effects: writes the KV of the computed tokens to the prompt's buffer.
        """

    def choose(self, prompt: RepairInput) -> Chosen | None:
        """Choose the rows that `repair` would compute, without computing them.

        `step` can then compute them in pieces, in the order of their slots. As a row sees no later
        one, in no layer, the prompt's KV is then what `repair` makes it. Asked for only where
        `can_share` is true.

        Returns:
            None if the method chooses layer by layer, so that its rows must be computed together.

        Raises:
            ConfigError: as `repair`.

        Effects: may write KV of tokens that have none to the prompt's buffer.
        """

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """Compute each row's tokens: append new ones, or repair those at the row's `slots`.

        Returns:
            (sum of the rows' `num_logits`, vocab_size) logits after the last tokens of each row, in
            the order of rows and tokens.

        Effects: writes the tokens' KV, and raises the `kv.length` of each row without `slots` by
        their number. If it fails, no length has changed, and of several rows each may be tried
        again. Callers take tokens back by lowering `kv.length`: what lies behind it is never read,
        and written over.
        """

    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """(batch, vocab_size) logits of the last token, computed by the unmodified model.

        Benchmarks and the self-test compare this library with it.

        Args:
            token_ids: (batch, seq_len) int64.
            split: compute this many tokens first and the others in a second pass over their KV;
                None for all in one pass. The two results differ by rounding.
        """


def exclusively(model: Backend, work: Callable[[], T]) -> T:
    """Do work where torch may compute, while nobody else uses the model."""

    def locked() -> T:
        with model.lock, torch.inference_mode():
            return work()

    return on_model_thread(locked)
