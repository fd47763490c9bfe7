"""Repair beside answers: in pieces between the tokens of running ones, and along its own answer.

`Pieces` says where a prompt's repair may be cut. A row sees no later one, so pieces in the order of
slots give what one pass gives. Only where a method moves a chunk's other tokens as its computed
ones are (drift), all of that chunk's rows are in one piece.

`Following` is repair that goes on while the answer is made. A question attends to what the first
token needs. The tokens behind it are read from other places, which were left stale
(docs/experiments.md). So each of an answer's first tokens chooses, too: it is computed once to see
what it attends to, that is recomputed, and it is computed again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.base import Backend
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods import AnchorFlow, InfoFlow, Layout


class Following:
    """What is left to follow of one answer.

    Attributes:
        computed: how many (token, layer) pairs it took so far, without the answer's own tokens.
    """

    def __init__(self, method: AnchorFlow, layout: Layout, rows: torch.Tensor) -> None:
        """Begin behind a prompt's repair.

        Args:
            layout: how the prompt was covered before it.
            rows: (num_rows,) slots of the prompt's tokens that were computed.
        """
        self.computed = 0
        self._left, self._method, self._layers = method.follow_tokens, method, layout.num_layers
        self._stale = layout.reused.clone()
        self._each = math.ceil(method.follow_ratio * int(self._stale.sum()))
        self._stale[rows.cpu()] = False

    @property
    def is_over(self) -> bool:
        """Whether the next token is an ordinary one."""
        return not (self._left and self._each and self._stale.any())

    @torch.inference_mode()
    def step(
        self, model: Backend, buffer: KVBuffer, token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the last of `token_ids`, the prompt's and the answer's so far, and what it needs.

        Returns:
            (1, vocab_size) logits after it, and (num_rows,) slots of the prompt's tokens that were
            recomputed.

        Effects: writes its KV, and that of the prompt's recomputed tokens, to `buffer`, which
        holds that of all others.
        """
        count, prompt = len(token_ids), len(self._stale)
        fresh = torch.zeros(count, dtype=torch.bool)
        fresh[-1] = True
        exact = ~fresh
        exact[:prompt] = ~self._stale
        stale = int(self._stale.sum())
        share = min(1.0, (self._each + 0.5) / stale)  # a half more, for it is rounded down
        wanted = InfoFlow(share, self._method.depth)
        layout = Layout(fresh, exact, (), self._layers)
        done = model.repair(buffer, torch.tensor([list(token_ids)]), layout, wanted)
        rows = done.rows[done.rows < prompt].cpu()
        self._stale[rows] = False
        self._left -= 1
        self.computed += done.computed - self._layers
        return done.logits, rows


@dataclass
class Pieces:
    """Rows of a prompt that are still to be computed.

    Attributes:
        slots: theirs, ascending.
        drifting: (begin, end) slots of the chunks that must not be cut, ascending.
    """

    slots: list[int]
    drifting: Sequence[tuple[int, int]] = ()

    @property
    def done(self) -> int | None:
        """How many of the prompt's tokens, from the first, are final; None for all."""
        if not self.slots:
            return None
        chunk = self._around(self.slots[0])
        return chunk[0] if chunk else self.slots[0]

    def count(self, most: int, *, at_least: bool = False) -> int:
        """How many rows the next piece has.

        Args:
            most: no more than that, as far as there is a place to cut; 0 if there is none.
            at_least: then up to the first place, instead of 0.
        """
        if most >= len(self.slots):
            return len(self.slots)
        chunk = self._around(self.slots[most])
        if chunk is None:
            return most
        before = bisect_left(self.slots, chunk[0])
        return before or (bisect_left(self.slots, chunk[1]) if at_least else 0)

    def _around(self, slot: int) -> tuple[int, int] | None:
        """The chunk that must not be cut and has a slot; None if there is none."""
        return next((chunk for chunk in self.drifting if chunk[0] <= slot < chunk[1]), None)
