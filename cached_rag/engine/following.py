"""Repair that goes on while an answer is made, for what its first tokens attend to.

A question attends to what the first token needs. The tokens behind it are read from other places,
which were left stale (docs/experiments.md). So each of an answer's first tokens chooses, too: it is
computed once to see what it attends to, that is recomputed, and it is computed again. Knows a
model and one prompt's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
