"""Answers many prompts at once: who comes in when, what is computed in one pass, who leaves.

A turn lets waiting requests in, as far as there is room, and makes one step of all running
answers: each row's next token, and pieces of prompts still to be prefilled (continuous batching).
Whoever has torch makes the turns: the main thread for its own requests, the model's thread for
all others. Knows requests and bounds; knows no text.
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
from cached_rag.engine import prefill
from cached_rag.engine.request import Request, Status, Waiting
from cached_rag.engine.sharing import NOTHING, Beginning, Sharing
from cached_rag.errors import ContextOverflowError

_log = logging.getLogger(__name__)


class Scheduler:
    """The one place where answers are made on a model, from whatever library."""

    def __init__(self, model: Backend, config: BatchConfig) -> None:
        self.config = config
        self._model = model
        self._waiting = Waiting(config.max_waiting)
        self._running: list[Request] = []
        self._sharing = Sharing(model.shapes, shares=config.shares and model.can_batch)
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
        return self._sharing.nbytes

    # From any thread -------------------------------------------------------------------------

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
            if request.is_wanted:
                prefill.read(request)
        except BaseException as error:
            self._finish(request, Status.FAILED, error)
            if not isinstance(error, Exception):
                raise
            return
        if is_driven:
            self.drive(request)

    def drive(self, request: Request) -> None:
        """Let the model's thread make a request's answer from now on."""
        with self._driver:
            self._driven.add(request)
            if not self._is_driving:
                self._is_driving = True
                model_thread.submit(self._drive)

    def cancel(self, request: Request) -> None:
        """End a request's answer before its next token. Never waits, so a collector may call it."""
        request.is_wanted = False
        self._cancelled.append(request)
        self._sweep_if_free()

    def forget(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Answer nothing from here on with KV of running prompts that contain these tokens."""
        self._forgotten.append((namespace, token_ids))
        self._sweep_if_free()

    def close(self) -> None:
        """Cancel all requests."""
        for request in [*self._waiting, *self._running]:
            self.cancel(request)

    # The life of a request: admit, run, take, finish -----------------------------------------

    @torch.inference_mode()
    def turn(self) -> None:
        """Let requests in, and make one step of all answers. On a thread that may use torch."""
        with self._turning:
            self._sweep()
            computed = self._admit()
            self._run(self._batch(computed))
        self._sweep_if_free()

    def _admit(self) -> int:
        """Let in who has room; returns how many prompt tokens were computed for that."""
        computed = 0
        while len(self._running) < self.config.max_rows and computed < self.config.prefill_tokens:
            request = self._waiting.first()
            if request is None:
                break
            try:
                if not request.is_wanted:
                    self._finish(request, Status.CANCELLED)
                    continue
                if request.plan is None:  # made once, however long it waits for room
                    prefill.prepare(request)
                beginning = self._beginning(request)
                if beginning.is_coming or not self._has_room(request, beginning):
                    break
                self._waiting.remove(request)
                computed += self._start(request, beginning)
            except BaseException as error:
                self._finish(request, Status.FAILED, error)
                if not isinstance(error, Exception):
                    raise
        return computed

    def _run(self, batch: Sequence[tuple[Request, int]]) -> None:
        """One pass for all; if it fails, each half alone, down to the row whose fault it is.

        A pass that fails leaves nothing behind: what it wrote stands beyond its rows' lengths.

        Args:
            batch: requests, and how many of its pending tokens each computes.
        """
        if not batch:
            return
        try:
            with self._model.lock:
                logits = self._model.step([_ahead(request, count) for request, count in batch])
        except Exception as error:
            if len(batch) == 1:
                self._finish(batch[0][0], Status.FAILED, error)
                return
            _log.warning("a pass for %d answers failed: %r; each half is tried", len(batch), error)
        else:
            self._take_all(batch, logits)
            return
        # Here, where the error and with it the memory of what failed is gone.
        half = len(batch) // 2
        self._run(batch[:half])
        self._run(batch[half:])

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        """The request's next token, by (1, vocab_size) logits; its last one ends it."""
        try:
            piece = request.decoding.take(logits)
        except BaseException as error:
            self._finish(request, Status.FAILED, error)
            if not isinstance(error, Exception):
                raise
            return
        if request.status is not Status.ANSWERING:
            request.status = Status.ANSWERING
            request.report.ttft_ms = request.clock.total()
        request.pending = request.decoding.token_ids[-1:]
        if piece:
            request.deliver(piece)
        if request.decoding.finish_reason:
            self._finish(request, Status.FINISHED)

    def _finish(self, request: Request, status: Status, last: BaseException | None = None) -> None:
        """The one way out, wherever a request is; what it held is free, unless others read it."""
        if request.status.is_over:
            return
        self._waiting.remove(request)
        if request in self._running:
            self._running.remove(request)
        try:
            row = request.row
            is_free = row is None or self._sharing.leave(row)
            request.release(is_free=is_free)
        except Exception:  # is nobody else's concern, and the answer is complete all the same
            _log.exception("what an answer left could not be kept")
        finally:
            request.finish(status, last)

    # What they ask ---------------------------------------------------------------------------

    def _beginning(self, request: Request) -> Beginning:
        """What finished and running prompts have of a prompt's beginning."""
        assert request.plan is not None
        if request.plan.positions is not None:
            return NOTHING
        return self._sharing.beginning(
            request.resources.sequences,
            request.namespace,
            request.tokens.ids,
            request.exact_length,
            request.repair,
        )

    def _has_room(self, request: Request, beginning: Beginning) -> bool:
        """Whether the memory bound allows for a prompt's KV and its answer's.

        Raises:
            ContextOverflowError: it never will.
        """
        bound = self.config.max_bytes
        if bound is None:
            return True
        count = len(request.tokens) + request.config.max_tokens - len(beginning)
        needed = count * self._model.shapes.bytes_per_token
        if self._sharing.nbytes + needed <= bound:
            return True
        if not self._running:
            raise ContextOverflowError(
                f"prompt and answer need {needed} bytes of KV, and BatchConfig.max_bytes is "
                f"{bound}; raise it, retrieve less, or lower max_tokens"
            )
        return False

    def _start(self, request: Request, beginning: Beginning) -> int:
        """Begin an answer; returns how many prompt tokens were computed."""
        plan, room = request.plan, request.config.max_tokens
        assert plan is not None
        request.status = Status.PREFILLING
        request.decoding.prompt_ids = request.tokens.ids
        is_covered = all(place.end <= len(beginning) for place in plan.placements)
        if is_covered and (beginning.runs or self._running) and self._model.can_append:
            prefill.follow(request, beginning)
            request.row = self._sharing.begin(request.as_row(), beginning, plan.positions, room)
            request.note_sharing()
            self._running.append(request)
            return 0
        computed = prefill.compute(request, beginning)
        assert request.buffer is not None
        request.row = self._sharing.adopt(
            request.as_row(), request.buffer, beginning, prefill.unrepaired(request), room
        )
        request.note_sharing()
        self._running.append(request)
        self._take(request, request.logits)
        return computed

    def _batch(self, computed: int) -> list[tuple[Request, int]]:
        """Who steps, and with how many tokens: every answer with one, prompts with what is left."""
        left = max(1, self.config.prefill_tokens - computed)
        batch = []
        for request in self._running:
            is_answering = request.status is Status.ANSWERING
            count = 1 if is_answering else min(left, len(request.pending))
            if count:
                batch.append((request, count))
                left -= 0 if is_answering else count
        return batch

    def _take_all(self, batch: Sequence[tuple[Request, int]], logits: torch.Tensor) -> None:
        """Next tokens, by (len(batch), vocab_size) logits, of rows whose prompts are complete."""
        for request, count in batch:
            del request.pending[:count]
        left = [(request, row) for row, (request, _) in enumerate(batch) if not request.pending]
        try:
            while left:
                request, row = left.pop(0)
                self._take(request, logits[row : row + 1])
        except BaseException as error:  # whose token was not taken cannot go on
            for request, _ in left:
                self._finish(request, Status.FAILED, error)
            raise

    # Driving and sweeping --------------------------------------------------------------------

    def _drive(self) -> None:
        """Turn after turn; between two of them the thread is free for other work."""
        try:
            self.turn()
        except BaseException as error:  # else those who wait would wait forever
            _log.exception("a turn failed; all requests fail with it")
            self._fail_all(error)
        with self._driver:
            self._driven = {request for request in self._driven if not request.status.is_over}
            self._is_driving = bool(self._driven)
            if self._is_driving:
                model_thread.submit(self._drive)

    def _fail_all(self, error: BaseException) -> None:
        with self._turning:
            # Who comes once the first have failed is not to blame, so the list is made before.
            for request in [*self._running, *self._waiting]:
                with contextlib.suppress(Exception):
                    self._finish(request, Status.FAILED, error)

    def _sweep(self) -> None:
        """Let the cancelled go, and what was forgotten."""
        while self._forgotten:
            self._sharing.forget(*self._forgotten.popleft())
        while self._cancelled:
            self._finish(self._cancelled.popleft(), Status.CANCELLED)

    def _sweep_if_free(self) -> None:
        """Whoever makes a turn sweeps behind it, so nobody has to wait for that here."""
        while (self._cancelled or self._forgotten) and self._turning.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._turning.release()


def _ahead(request: Request, count: int) -> StepInput:
    """What a request computes next."""
    assert request.row is not None
    return StepInput(request.row.kv, request.pending[:count])
