"""A request that is being answered: how its KV comes to be, and what it leaves behind.

Knows one row; knows no batch and no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cached_rag.backends.base import Backend
from cached_rag.engine.decoding import Answering, Prefill
from cached_rag.engine.prefill import Prepared
from cached_rag.engine.request import Request
from cached_rag.engine.sharing import Live, Row
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.rows import Run


@dataclass(eq=False)
class Running:
    """A request that is being answered.

    Attributes:
        pending: tokens whose KV is not there yet: the rest of the prompt, or the last token.
        prefill: whose buffer the answer grows in; None where it has another.
        is_remembered: what it leaves for later prompts was seen to.
    """

    request: Request
    prepared: Prepared
    row: Row
    answer: Answering
    pending: list[int] = field(default_factory=list)
    prefill: Prefill | None = None
    is_remembered: bool = False

    @property
    def is_answering(self) -> bool:
        """Whether its prompt is prefilled."""
        return bool(self.answer.token_ids)

    def leave(self, live: Live) -> None:
        """Free what it held, unless others refer to it."""
        # A text that was found, and forgotten before the row was there to be told.
        self.row.is_private |= self.request.prefiller.has_forgotten(self.prepared)
        is_free = live.leave(self.row, self.answer.token_ids)
        if self.prefill is not None:
            self.prefill.remember()
            if is_free:
                self.prefill.give_back()
        elif not self.is_remembered:
            self.request.prefiller.remember(self.prepared)


def begin(
    model: Backend, live: Live, request: Request, prepared: Prepared, runs: Sequence[Run]
) -> Running:
    """A prompt that is prefilled in the batch, behind the runs that others have."""
    tokens, report = prepared.tokens, prepared.report
    answer = _answering(model, request, prepared)
    done = sum(map(len, runs))
    row = live.begin(_namespace(request), tokens.ids, runs, request.config.max_tokens)
    row.kv.lay_out(prepared.plan.positions)
    report.modules_hit = prepared.plan.num_modules
    report.cached_tokens = done
    report.charged_recompute = 1 - done / len(tokens)
    if done:
        report.kv_bytes = row.kv.own.nbytes
        report.shared_kv_bytes = done * model.shapes.bytes_per_token
    return Running(request, prepared, row, answer, list(tokens.ids[done:]))


def complete(
    model: Backend, live: Live, request: Request, prepared: Prepared, runs: Sequence[Run]
) -> tuple[Running, torch.Tensor]:
    """A prompt that is prefilled at once, and its (1, vocab_size) logits."""
    answer = _answering(model, request, prepared)
    pieces = [_piece(run, prepared.tokens.ids) for run in runs]
    prefill = request.prefiller.complete(prepared, pieces)
    request.report = prefill.report
    try:
        row = live.adopt(_namespace(request), prefill, runs, request.config.max_tokens)
    except BaseException:
        prefill.release()
        raise
    # A buffer that was copied from, and given back, must not be held any longer.
    kept = prefill if row.kv.own is prefill.buffer else None
    running = Running(request, prepared, row, answer, prefill=kept, is_remembered=not kept)
    return running, prefill.logits


def _answering(model: Backend, request: Request, prepared: Prepared) -> Answering:
    request.report = prepared.report
    return Answering(model, prepared.tokens.ids, request.config, request.token_ids)


def _namespace(request: Request) -> str:
    return request.prefiller.library.namespace


def _piece(run: Run, ids: Sequence[int]) -> ModuleKV:
    """A run of a prompt's beginning as KV to be placed."""
    there = slice(run.begin, run.end)
    return ModuleKV(
        tuple(ids[run.slot : run.slot + len(run)]),
        run.slot,
        run.buffer.keys[:, 0, :, there],
        run.buffer.values[:, 0, :, there],
    )
