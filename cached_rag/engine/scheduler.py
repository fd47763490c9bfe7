"""Answers many prompts at once: who comes in when, what is computed in one pass, who leaves.

A turn lets waiting requests in, as far as there is room, and makes one step of all running
answers: each row's next token, and pieces of prompts still to be prefilled (continuous batching).
Whoever has torch makes the turns: the main thread for its own requests, the model's thread for
all others. Knows rows and bounds; knows no text.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence

import torch

from cached_rag.backends import thread as model_thread
from cached_rag.backends.base import Backend, StepInput
from cached_rag.config import BatchConfig
from cached_rag.engine import running
from cached_rag.engine.prefill import Prepared
from cached_rag.engine.request import Request, Waiting
from cached_rag.engine.running import Running
from cached_rag.engine.sharing import Live
from cached_rag.errors import ContextOverflowError
from cached_rag.kv.rows import Run

_log = logging.getLogger(__name__)


class Scheduler:
    """The one place where answers are made on a model, from whatever library."""

    def __init__(self, model: Backend, config: BatchConfig) -> None:
        self.config = config
        self._model = model
        self._waiting = Waiting(config.max_waiting)
        self._running: list[Running] = []
        shares = config.shares and model.can_batch
        self._live = Live(model.shapes, shares=shares, recent_bytes=config.recent_bytes)
        self._prepared: tuple[Request, Prepared] | None = None
        self._turning = threading.Lock()
        self._cancelled: deque[Request] = deque()
        self._forgotten: deque[tuple[str, Sequence[int]]] = deque()
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

    @property
    def recent_nbytes(self) -> int:
        """Bytes of the KV that is kept of finished answers."""
        return self._live.recent_nbytes

    def submit(self, request: Request) -> None:
        """Queue a request. Its turn can come once its prompt is read.

        Raises:
            BusyError: too many wait.
        """
        self._waiting.add(request, max(0, self.config.max_rows - len(self._running)))

    def read(self, request: Request, *, is_driven: bool) -> None:
        """Read a queued request's prompt, on this thread; what goes wrong is its answer's end.

        Args:
            is_driven: the model's thread makes its answer; else who waits for it calls `turn`.
        """
        try:
            if not request.is_cancelled:
                request.read = request.prefiller.read(request.planner, request.config)
        except BaseException as error:
            self._waiting.remove(request)
            _finish(request, "error", error)
            if not isinstance(error, Exception):
                raise
            return
        if is_driven:
            self.drive(request)

    def cancel(self, request: Request) -> None:
        """End a request's answer before its next token. Never waits, so a collector may call it."""
        request.is_cancelled = True
        self._cancelled.append(request)
        self._sweep_if_free()

    def forget(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Answer nothing from here on with what prompts left that contain these tokens."""
        self._forgotten.append((namespace, token_ids))
        self._sweep_if_free()

    def close(self) -> None:
        """Cancel all requests."""
        for request in [*self._waiting, *(one.request for one in list(self._running))]:
            self.cancel(request)

    @torch.inference_mode()
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
        try:
            self.turn()
        except BaseException as error:  # else those who wait would wait forever
            _log.exception("a turn failed; all requests fail with it")
            self._fail_all(error)
        with self._driver:
            self._driven = {request for request in self._driven if not request.finish_reason}
            self._is_driving = bool(self._driven)
            if self._is_driving:
                model_thread.submit(self._drive)

    def drive(self, request: Request) -> None:
        """Let the model's thread make a request's answer from now on."""
        with self._driver:
            self._driven.add(request)
            if not self._is_driving:
                self._is_driving = True
                model_thread.submit(self._drive)

    # Coming ----------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Let in who has room; returns how many prompt tokens were computed for that."""
        computed = 0
        while len(self._running) < self.config.max_rows and computed < self.config.prefill_tokens:
            request = self._waiting.first()
            if request is None:
                break
            if request.is_cancelled:
                self._leave_queue(request)
                continue
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
                for one in [one for one in self._running if one.request is request]:
                    self._end(one, error)
                _finish(request, "error", error)
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
        assert request.read is not None
        prepared = request.prefiller.prepare(request.read, request.config)
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
            ContextOverflowError: it never will.
        """
        bound = self.config.max_bytes
        if bound is None:
            return True
        count = len(prepared.tokens) + prepared.config.max_tokens - sum(map(len, runs))
        needed = count * self._model.shapes.bytes_per_token
        if self._live.nbytes + needed <= bound:
            return True
        if not self._running:
            raise ContextOverflowError(
                f"prompt and answer need {needed} bytes of KV, and BatchConfig.max_bytes is "
                f"{bound}; raise it, retrieve less, or lower max_tokens"
            )
        return False

    def _start(self, request: Request, prepared: Prepared, runs: Sequence[Run]) -> int:
        """Begin an answer; returns how many prompt tokens were computed."""
        done = sum(map(len, runs))
        rest = [place for place in prepared.plan.placements if place.end > done]
        what = (self._model, self._live, request, prepared, runs)
        if not rest and (runs or self._running) and self._model.can_append:
            self._running.append(running.begin(*what))
            return 0
        one, logits = running.complete(*what)
        self._running.append(one)
        self._take(one, logits)
        return int(request.report.charged_recompute * len(prepared.tokens))

    # Going on --------------------------------------------------------------------------------

    def _batch(self, computed: int) -> list[tuple[Running, int]]:
        """Who steps, and with how many tokens: every answer with one, prompts with what is left."""
        left = max(1, self.config.prefill_tokens - computed)
        batch = []
        for one in self._running:
            count = 1 if one.is_answering else min(left, len(one.pending))
            if count:
                batch.append((one, count))
                left -= 0 if one.is_answering else count
        return batch

    def _step(self, batch: Sequence[tuple[Running, int]]) -> None:
        """One pass for all; if it fails, each half alone, down to the row whose fault it is.

        A pass that fails leaves nothing behind: what it wrote stands beyond its rows' lengths.
        """
        ahead = [StepInput(one.row.kv, one.pending[:count]) for one, count in batch]
        try:
            with self._model.lock:
                logits = self._model.step(ahead)
        except Exception as error:
            if len(batch) == 1:
                self._end(batch[0][0], error)
                return
            _log.warning("a pass for %d answers failed: %r; each half is tried", len(batch), error)
        else:
            self._take_all(batch, logits)
            return
        # Here, where the error and with it the memory of what failed is gone.
        half = len(batch) // 2
        self._step(batch[:half])
        self._step(batch[half:])

    def _take_all(self, batch: Sequence[tuple[Running, int]], logits: torch.Tensor) -> None:
        """Next tokens, by (len(batch), vocab_size) logits, of rows whose prompts are complete."""
        for one, count in batch:
            del one.pending[:count]
        left = [(one, row) for row, (one, _) in enumerate(batch) if not one.pending]
        try:
            while left:
                one, row = left.pop(0)
                self._take(one, logits[row : row + 1])
        except BaseException as error:  # whose token was not taken cannot go on
            for one, _ in left:
                self._end(one, error)
            raise

    def _take(self, one: Running, logits: torch.Tensor) -> None:
        """The row's next token; its last one ends it."""
        request, is_first = one.request, not one.is_answering
        try:
            piece = one.answer.take(logits)
        except BaseException as error:
            self._end(one, error)
            if not isinstance(error, Exception):
                raise
            return
        if is_first:
            request.report.ttft_ms = request.clock.total()
        one.pending = request.token_ids[-1:]
        if piece:
            request.deliver(piece)
        if one.answer.finish_reason:
            self._end(one, None)

    # Leaving ---------------------------------------------------------------------------------

    def _end(self, one: Running, last: BaseException | None) -> None:
        """A row leaves; what it held is free, unless others refer to it."""
        self._running.remove(one)
        request = one.request
        request.report.output_tokens = len(request.token_ids)
        request.report.total_ms = request.clock.total()
        try:
            one.leave(self._live)
        except Exception:  # is nobody else's concern, and the answer is complete all the same
            _log.exception("what an answer left could not be kept")
        finally:
            one.prepared.is_over()
            _finish(request, one.answer.finish_reason or ("error" if last else "cancelled"), last)

    def _fail_all(self, error: BaseException) -> None:
        with self._turning:
            waiting = list(self._waiting)  # who comes once the first have failed is not to blame
            for one in list(self._running):
                with contextlib.suppress(Exception):
                    self._end(one, error)
            for request in waiting:
                self._waiting.remove(request)
                _finish(request, "error", error)
            self._give_up_prepared()

    def _sweep(self) -> None:
        """Let the cancelled go, and what was forgotten."""
        while self._forgotten:
            self._live.forget(*self._forgotten.popleft())
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.finish_reason:
                continue
            found = next((one for one in self._running if one.request is request), None)
            if found is not None:
                self._end(found, None)
                continue
            self._leave_queue(request)

    def _leave_queue(self, request: Request) -> None:
        """A request that waited is cancelled."""
        self._waiting.remove(request)
        if self._prepared is not None and self._prepared[0] is request:
            self._give_up_prepared()
        _finish(request, "cancelled", None)

    def _sweep_if_free(self) -> None:
        """Whoever makes a turn sweeps behind it, so nobody has to wait for that here."""
        while (self._cancelled or self._forgotten) and self._turning.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._turning.release()


def _finish(request: Request, reason: str, last: BaseException | None) -> None:
    """Say how a request ended, unless that was said before."""
    if request.finish_reason is None:
        request.finish_reason = reason
        request.deliver(last)
