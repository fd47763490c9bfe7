"""What runs a model, as all that stands above it sees one.

A backend computes. What is computed, for whom and in which order is decided above it, and where KV
lies is known below it (`kv`). To add one: a class with these members, and a test that runs the
engine on it (`tests/test_backends.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.positions import PositionRule
from cached_rag.kv.rows import RowKV
from cached_rag.methods.base import Layout, Selector


@dataclass(frozen=True)
class StepInput:
    """Tokens that follow what `kv` holds; their KV is appended to it."""

    kv: RowKV
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Slots that are filled afterwards."""
        return self.kv.length + len(self.token_ids)


@dataclass
class Prefilled:
    """What a prefill gave.

    Attributes:
        tail: (batch, num_logits, vocab_size) of the last rows.
        computed: (token, layer) pairs that were computed, check layers in full.
        rows: slots whose keys and values were computed in every layer, ascending.
    """

    tail: torch.Tensor
    computed: int
    rows: torch.Tensor

    @property
    def logits(self) -> torch.Tensor:
        """(batch, vocab_size) of the last row."""
        return self.tail[:, -1]


class Backend(Protocol):
    """One loaded model. Who uses it holds its lock; its deeds are done where torch may compute."""

    # What it is ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As asked for."""
        ...

    @property
    def fingerprint(self) -> str:
        """What its KV depends on besides tokens."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A fast transformers tokenizer."""
        ...

    @property
    def vocab_size(self) -> int:
        """How many tokens it has logits for."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens that a prompt and its answer may have."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def repetition_penalty(self) -> float:
        """The model's own; 1 for none."""
        ...

    @property
    def shapes(self) -> KVShapes:
        """Sizes, dtype and device of its KV."""
        ...

    @property
    def rule(self) -> PositionRule:
        """How its keys depend on position, and so whether they can be moved."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights as they are held."""
        ...

    @property
    def lock(self) -> threading.Lock:
        """Held by whoever uses the model; engines may share one."""
        ...

    # What it can -----------------------------------------------------------------------------

    @property
    def can_watch(self) -> bool:
        """Whether `repair` takes methods that ask the question what it attends to."""
        ...

    @property
    def can_batch(self) -> bool:
        """Whether `step` computes several rows in one pass, and they may share runs of KV."""
        ...

    @property
    def can_append(self) -> bool:
        """Whether `step` takes more than one token of a row."""
        ...

    # What it does ----------------------------------------------------------------------------

    def prefill(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        num_logits: int = 1,
    ) -> Prefilled:
        """Compute the rows at `slots` in every layer; the buffer must hold the others.

        Args:
            token_ids: (batch, seq_len) int64, the whole prompt.
            slots: (num_rows,) ascending; None for all.
            num_logits: of how many last rows logits are wanted; 0 for none.

        Effects: writes the rows' slots of `buffer`.
        """
        ...

    def repair(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        layout: Layout,
        method: Selector,
        ready: Callable[[int], object] | None = None,
    ) -> Prefilled:
        """Compute what has no KV, and the rows that a method chooses.

        Args:
            token_ids: (1, seq_len) int64, the whole prompt.
            layout: which slots of `buffer` hold reusable KV.
            ready: called with each layer before its cached KV is used, to wait for it.

        Raises:
            ModelError: the method asks for what the backend cannot do.

        Effects: writes the chosen rows' slots of `buffer`.
        """
        ...

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """(batch, vocab_size) logits after each row's tokens; their KV is written and counted.

        Where it fails, no row's length has changed.
        """
        ...

    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """(batch, vocab_size) logits of the last tokens by the model's own means, as without us.

        Args:
            token_ids: (batch, seq_len) int64.
            split: how many tokens to compute first, the others behind their KV; None for all at
                once. The two differ by the model's own error.
        """
        ...
