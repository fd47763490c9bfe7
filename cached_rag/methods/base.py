"""What a method decides: which rows are computed, layer by layer. Knows tensors; knows no model.

To add a method: one file with a frozen dataclass that has these members, one line in the table of
`methods/__init__.py`, one row in docs/methods.md. The docstring of the class links its paper, and
says what it recomputes and why, what that costs, and when to use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import torch


@dataclass(frozen=True)
class Layout:
    """How the prompt is covered, one entry a token.

    Attributes:
        fresh: (seq_len,) bool; without usable KV, as the question is. Always computed.
        exact: (seq_len,) bool; cached KV is what full prefill would compute. Never recomputed.
        modules: (begin, end) of the reused runs that are neither; their KV is approximate.
        num_layers: of the model.
        settled: those of `modules` that were encoded behind other chunks of their document, so that
            their KV needs less repair.
    """

    fresh: torch.Tensor
    exact: torch.Tensor
    modules: tuple[tuple[int, int], ...]
    num_layers: int
    settled: tuple[tuple[int, int], ...] = ()

    @property
    def reused(self) -> torch.Tensor:
        """(seq_len,) bool: approximate tokens, the ones a method may choose to recompute."""
        return ~(self.fresh | self.exact)

    @property
    def question(self) -> int:
        """Where the question begins: behind the last token that has cached KV."""
        covered = (~self.fresh).nonzero()
        return int(covered[-1]) + 1 if len(covered) else 0


@dataclass(frozen=True)
class LayerCheck:
    """What is known at a check layer, for the rows computed so far.

    Attributes:
        layer: index of the layer.
        slots: (num_rows,) the rows' slots.
        reused: (num_rows,) bool; rows that may be dropped (the others are live).
        fresh_keys, cached_keys: (num_kv_heads, num_rows, head_dim), rotated for the rows' slots.
        fresh_values, cached_values: (num_kv_heads, num_rows, value_dim).
    """

    layer: int
    slots: torch.Tensor
    reused: torch.Tensor
    fresh_keys: torch.Tensor
    fresh_values: torch.Tensor
    cached_keys: torch.Tensor
    cached_values: torch.Tensor


class Takes(Enum):
    """Which of a prompt's cached KV a method uses: none, what is exact, or all."""

    NOTHING = "nothing"
    EXACT = "exact"
    ALL = "all"


class Selector(Protocol):
    """A method. Pure: the same inputs give the same rows, nothing is kept."""

    @property
    def takes(self) -> Takes:
        """Which cached KV it uses."""
        ...

    @property
    def gives_way(self) -> bool:
        """Whether a model that cannot do it does what it can; else that is an error."""
        ...

    @property
    def reported_as(self) -> str:
        """Its name in reports; empty for the name by which it was asked for."""
        ...

    @property
    def transfers_drift(self) -> bool:
        """Whether a module's other tokens are moved as its recomputed ones are (`row_cache.py`)."""
        ...

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """(seq_len,) bool: rows computed in layer 0; must contain `layout.fresh`."""
        ...

    def check_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers before whose attention `narrow` is asked, ascending, each >= 1."""
        ...

    def narrow(self, check: LayerCheck, layout: Layout) -> torch.Tensor:
        """(num_rows,) bool: rows to go on with; must contain the rows that are not reused."""
        ...


class StaticSelector:
    """Base of methods that choose their rows before the first layer."""

    takes: ClassVar[Takes] = Takes.ALL
    gives_way: ClassVar[bool] = False
    reported_as: ClassVar[str] = ""
    transfers_drift: bool = False

    def check_layers(self, layout: Layout) -> tuple[int, ...]:
        """None: the choice is made once."""
        return ()

    def narrow(self, check: LayerCheck, layout: Layout) -> torch.Tensor:
        """Never asked; keeps every row."""
        return torch.ones_like(check.reused)
