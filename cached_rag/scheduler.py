"""Answers many prompts at once: who comes in when, what is computed in one pass, who leaves.

A turn lets waiting requests in, as far as there is room, and makes one step of all running
answers: each row's next token, and pieces of prompts still to be prefilled (continuous batching).
Whoever has torch makes the turns: the main thread for its own requests, the model's thread for
all others. Knows rows and bounds; knows no text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cached_rag import model_thread
from cached_rag.answering import Answering, Prefill
from cached_rag.batch_step import Ahead, can_append, can_batch, step_batch
from cached_rag.config import BatchConfig
from cached_rag.errors import BusyError
from cached_rag.kv import ModuleKV
from cached_rag.live import Live, Row
from cached_rag.model import LanguageModel
from cached_rag.prefiller import Prepared
from cached_rag.request import Request, Waiting
from cached_rag.row_kv import Run


@dataclass(eq=False)
class _Running:
    """A request that is being answered.

    Attributes:
        pending: tokens whose KV is not there yet: the rest of the prompt, or the last token.
        prefill: None for prompts that are prefilled in the batch.
    """

    request: Request
    prepared: Prepared
    row: Row
    answer: Answering
    pending: list[int] = field(default_factory=list)
    prefill: Prefill | None = None

    @property
    def is_answering(self) -> bool:
        """Whether its prompt is prefilled."""
        return bool(self.answer.token_ids)


class Scheduler:
    """The one place where answers are made on a model, from whatever library."""

    def __init__(self, model: LanguageModel, config: BatchConfig) -> None:
        self.config = config
        self._model = model
        self._waiting = Waiting(config.max_waiting)
        self._running: list[_Running] = []
        self._live = Live(model.shapes, shares=config.shares and can_batch(model))
        self._prepared: tuple[Request, Prepared] | None = None
        self._turning = threading.Lock()
        self._cancelled: deque[Request] = deque()
        self._driver = threading.Lock()
        self._driven: set[Request] = set()
        self._is_driving = False

    @property
    def num_running(self) -> int:
        """Answers that are being made."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests whose turn has not come."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of running answers, what they share counted once."""
        return self._live.nbytes

    def submit(self, request: Request, *, is_driven: bool) -> None:
        """Queue a request.

        Args:
            is_driven: the model's thread makes its answer; else who waits for it calls `turn`.

        Raises:
            BusyError: too many wait.
        """
        self._waiting.add(request, max(0, self.config.max_rows - len(self._running)))
        if is_driven:
            with self._driver:
                self._driven.add(request)
                if not self._is_driving:
                    self._is_driving = True
                    model_thread.submit(self._drive)

    def cancel(self, request: Request) -> None:
        """End a request's answer before its next token. Never waits, so a collector may call it."""
        request.is_cancelled = True
        self._cancelled.append(request)
        self._sweep_if_free()

    def close(self) -> None:
        """Cancel all requests."""
        for request in [*self._waiting, *(one.request for one in list(self._running))]:
            self.cancel(request)

    def turn(self) -> None:
        """Let requests in, and make one step of all answers. On a thread that may use torch."""
        with self._turning:
            self._sweep()
            fresh = self._admit()
            batch = self._batch(fresh)
            if batch:
                self._step(batch)
        self._sweep_if_free()

    def _drive(self) -> None:
        """Turn after turn; between two of them the thread is free for other work."""
        self.turn()
        with self._driver:
            self._driven = {request for request in self._driven if not request.finish_reason}
            self._is_driving = bool(self._driven)
            if self._is_driving:
                model_thread.submit(self._drive)

    # Coming ----------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Let in who has room; returns how many prompt tokens were computed for that."""
        computed = 0
        while len(self._running) < self.config.max_rows and computed < self.config.prefill_tokens:
            request = self._waiting.first()
            if request is None:
                break
            try:
                prepared = self._prepare(request)
                runs, more_is_coming = self._beginning(request, prepared)
                if more_is_coming or not self._has_room(prepared, runs):
                    break
                self._waiting.remove(request)
                computed += self._start(request, prepared, runs)
            except BaseException as error:
                self._waiting.remove(request)
                self._give_up_prepared()
                self._fail(request, error)
                if not isinstance(error, Exception):
                    raise
            self._prepared = None
        return computed

    def _prepare(self, request: Request) -> Prepared:
        """The request's plan, made once, however long it waits for room."""
        if self._prepared is not None:
            if self._prepared[0] is request:
                return self._prepared[1]
            self._give_up_prepared()
        prepared = request.prefiller.prepare(request.planner, request.config)
        self._prepared = (request, prepared)
        return prepared

    def _give_up_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared[1].is_over()
            self._prepared = None

    def _beginning(self, request: Request, prepared: Prepared) -> tuple[tuple[Run, ...], bool]:
        """What a running answer has of the prompt's beginning, and whether it will have more."""
        limit = 0 if prepared.plan.positions else prepared.exact_length
        namespace = request.prefiller.library.namespace
        return self._live.beginning(namespace, prepared.tokens.ids, limit)

    def _has_room(self, prepared: Prepared, runs: Sequence[Run]) -> bool:
        """Whether the memory bound allows for a prompt's KV and its answer's.

        Raises:
            BusyError: it never will.
        """
        bound = self.config.max_bytes
        if bound is None:
            return True
        count = len(prepared.tokens) + prepared.config.max_tokens - sum(map(len, runs))
        needed = count * self._model.shapes.bytes_per_token
        if self._live.nbytes + needed <= bound:
            return True
        if not self._running:
            raise BusyError(
                f"prompt and answer need {needed} bytes of KV, and BatchConfig.max_bytes is "
                f"{bound}; raise it, retrieve less, or lower max_tokens"
            )
        return False

    def _start(self, request: Request, prepared: Prepared, runs: Sequence[Run]) -> int:
        """Begin an answer; returns how many prompt tokens were computed."""
        tokens, config = prepared.tokens, request.config
        request.report = prepared.report
        answer = Answering(self._model, tokens.ids, config, request.token_ids)
        done = sum(map(len, runs))
        rest = [place for place in prepared.plan.placements if place.end > done]
        if not rest and (runs or self._running) and can_append(self._model):
            row = self._live.begin(
                request.prefiller.library.namespace, tokens.ids, runs, config.max_tokens
            )
            row.kv.lay_out(prepared.plan.positions)
            _say_shared(prepared, row, done, self._model.shapes.bytes_per_token)
            pending = list(tokens.ids[done:])
            self._running.append(_Running(request, prepared, row, answer, pending))
            return 0
        pieces = [_piece(run, tokens.ids) for run in runs]
        prefill = request.prefiller.complete(prepared, pieces)
        request.report = prefill.report
        try:
            namespace = request.prefiller.library.namespace
            row = self._live.adopt(namespace, prefill, runs, config.max_tokens)
        except BaseException:
            prefill.release()
            raise
        running = _Running(request, prepared, row, answer, prefill=prefill)
        self._running.append(running)
        self._take(running, prefill.logits)
        return int(prefill.report.charged_recompute * len(tokens))

    # Going on --------------------------------------------------------------------------------

    def _batch(self, computed: int) -> list[tuple[_Running, int]]:
        """Who steps, and with how many tokens: every answer with one, prompts with what is left."""
        left = max(1, self.config.prefill_tokens - computed)
        batch = []
        for one in self._running:
            count = 1 if one.is_answering else min(left, len(one.pending))
            if count:
                batch.append((one, count))
                left -= 0 if one.is_answering else count
        return batch

    def _step(self, batch: Sequence[tuple[_Running, int]]) -> None:
        ahead = [Ahead(one.row.kv, one.pending[:count]) for one, count in batch]
        try:
            with self._model.lock:
                logits = step_batch(self._model, ahead)
        except Exception as error:
            for one, _ in batch:
                self._end(one, error)
            return
        for index, (one, count) in enumerate(batch):
            del one.pending[:count]
            if not one.pending:
                self._take(one, logits[index : index + 1])

    def _take(self, one: _Running, logits: torch.Tensor) -> None:
        """The row's next token; its last one ends it."""
        request, is_first = one.request, not one.is_answering
        try:
            piece = one.answer.take(logits)
        except Exception as error:
            self._end(one, error)
            return
        if is_first:
            request.report.ttft_ms = request.clock.total()
        one.pending = request.token_ids[-1:]
        if piece:
            request.deliver(piece)
        if one.answer.finish_reason:
            request.finish_reason = one.answer.finish_reason
            self._end(one, None)

    # Leaving ---------------------------------------------------------------------------------

    def _end(self, one: _Running, last: BaseException | None) -> None:
        """A row leaves; what it held is free, unless others refer to it."""
        self._running.remove(one)
        request, prefill = one.request, one.prefill
        report = request.report
        report.output_tokens = len(request.token_ids)
        report.total_ms = request.clock.total()
        is_free = self._live.leave(one.row)
        if prefill is None:
            request.prefiller.remember(one.prepared)
        elif one.row.kv.own is prefill.buffer:
            prefill.remember()
            if is_free:
                prefill.give_back()
        one.prepared.is_over()
        request.finish_reason = request.finish_reason or ("error" if last else "cancelled")
        request.deliver(last)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.finish_reason = "error"
        request.deliver(error)

    def _sweep(self) -> None:
        """Let the cancelled go."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.finish_reason:
                continue
            running = next((one for one in self._running if one.request is request), None)
            if running is not None:
                self._end(running, None)
                continue
            self._waiting.remove(request)
            if self._prepared is not None and self._prepared[0] is request:
                self._give_up_prepared()
            request.finish_reason = "cancelled"
            request.deliver(None)

    def _sweep_if_free(self) -> None:
        """Whoever makes a turn sweeps behind it, so nobody has to wait for that here."""
        while self._cancelled and self._turning.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._turning.release()


def _say_shared(prepared: Prepared, row: Row, shared: int, bytes_per_token: int) -> None:
    """What a prompt that is prefilled in the batch takes from others."""
    report = prepared.report
    report.modules_hit = prepared.plan.num_modules
    report.cached_tokens = shared
    report.charged_recompute = 1 - shared / len(row.ids)
    if shared:
        report.kv_bytes = row.kv.own.nbytes
        report.shared_kv_bytes = shared * bytes_per_token


def _piece(run: Run, ids: Sequence[int]) -> ModuleKV:
    """A run of a prompt's beginning as KV to be placed."""
    there = slice(run.begin, run.end)
    return ModuleKV(
        tuple(ids[run.slot : run.slot + len(run)]),
        run.slot,
        run.buffer.keys[:, 0, :, there],
        run.buffer.values[:, 0, :, there],
    )
