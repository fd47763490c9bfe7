"""Partial prefill: computes chosen rows (tokens) of a prompt over KV that holds the others.

CacheBlend, section 4.2, and the methods after it. Decides when which rows run; `row_pass.py` runs
them. Knows nothing of text or stores.

Two ways through the model give the same numbers. In the fast way only the chosen rows enter the
model, and it attends through `attention/scattered.py`. In the dense way all tokens enter, the model
builds its own masks and biases, and every per-row input is cut to the chosen rows before layer 0.
The dense way is slower. It serves model families whose attention cannot be replaced, and tests
compare the fast way with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cached_rag.backends.base import Chosen, Prefilled
from cached_rag.backends.transformers.decoder import Decoder
from cached_rag.backends.transformers.drift import Drift
from cached_rag.backends.transformers.row_cache import Observer
from cached_rag.backends.transformers.row_pass import RowPass
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import Layout, QuestionSelector, Selector


@torch.inference_mode()
def prefill_rows(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    num_logits: int = 1,
) -> Prefilled:
    """See `Backend.prefill`. With `num_logits` 0 the model's head is not computed."""
    slots = torch.arange(token_ids.shape[1]) if slots is None else slots
    run = RowPass(decoder, buffer, token_ids, slots.to(token_ids.device), num_logits)
    with run.hooked():
        return run.forward()


@dataclass(frozen=True)
class Repair:
    """A prompt with reused KV, and the method that says what of it is computed again.

    Attributes:
        buffer, token_ids, layout, method, ready: see `Backend.repair`.
    """

    decoder: Decoder
    buffer: KVBuffer
    token_ids: torch.Tensor
    layout: Layout
    method: Selector
    ready: Callable[[int], object] | None = None

    @torch.inference_mode()
    def run(self) -> Prefilled:
        """See `Backend.repair`. At its check layers the method drops rows."""
        if self._asks():
            return self._run_asked()
        run = self._pass(self._first_rows(), 1)
        run.layout, run.selector = self.layout, self.method
        run.checks = frozenset(self.method.check_layers(self.layout))
        run.cache.drift = self._drift()
        with run.hooked():
            return run.forward()

    @torch.inference_mode()
    def choose(self) -> Chosen | None:
        """See `Backend.choose`."""
        if self.method.check_layers(self.layout):
            return None
        if self._asks():
            return self._ask()[0]
        slots = self._first_rows()
        return Chosen(slots, slots, 0)

    def _asks(self) -> bool:
        """Whether the method looks at what the question attends to before it chooses."""
        method = self.method
        return isinstance(method, QuestionSelector) and bool(method.observed_layers(self.layout))

    def _first_rows(self) -> torch.Tensor:
        return self.method.first_rows(self.layout).nonzero().squeeze(1)

    def _drift(self) -> Drift | None:
        return Drift(self.layout.modules) if self.method.transfers_drift else None

    def _pass(self, slots: torch.Tensor, num_logits: int) -> RowPass:
        slots = slots.to(self.token_ids.device)
        return RowPass(self.decoder, self.buffer, self.token_ids, slots, num_logits, self.ready)

    def _run_asked(self) -> Prefilled:
        """Watch what the question attends to over the reused KV, then compute what it points at.

        The second pass does not compute the output of layer 0 again for the rows that the first one
        had: it stays valid, since reused KV of layer 0 is exact.
        """
        chosen, asked = self._ask()
        live, rows = self.layout.fresh.to(self.token_ids.device), chosen.left
        run = self._pass(rows, 1)
        run.cache.drift = self._drift()
        assert asked.first_output is not None
        known = asked.first_output[:, torch.isin(live.nonzero()[:, 0], rows)]
        done = run.resume(live[rows], known)
        done.computed += chosen.computed
        done.rows = chosen.rows
        return done

    def _ask(self) -> tuple[Chosen, RowPass]:
        """Compute the live rows, which have no KV; watch what the question among them attends to.

        Live rows before the first row that the method chooses stay valid, if they were computed in
        every layer, since nothing that they see changes. All others are to be computed again.

        Returns:
            The choice, and the pass.
        """
        if not self.decoder.is_fast:
            raise ModelError(
                "this model's attention cannot be watched, so methods that ask the question cannot "
                "be used with it; choose cacheblend, epic or reuse"
            )
        assert isinstance(self.method, QuestionSelector)
        live = self.layout.fresh.to(self.token_ids.device)
        asked = self._pass(live.nonzero().squeeze(1), 0)
        observer = Observer(self.method, self.layout)
        asked.watch(observer)
        chosen = self.method.choose(torch.stack(observer.scores), self.layout)
        first = int(chosen.nonzero()[0])
        is_valid = len(self.decoder.layers) - 1 in observer.layers
        every = (live | chosen).nonzero().squeeze(1)
        left = every[every >= first] if is_valid else every
        return Chosen(every, left, asked.computed), asked
