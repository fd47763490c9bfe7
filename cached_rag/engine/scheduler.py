"""Answers many prompts at once (continuous batching).

The work is done in turns. A turn first admits waiting requests, as far as there is room. It then
runs one step of the model for all running requests together: one more token of each answer, or
several where the next ones were drafted, and pieces of the prompts that are still to be prefilled.
The main thread makes the turns for its own requests, the model's thread for all others. Knows
when a request begins, fails and ends; what it has in memory is `batch.py`'s.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import torch

from cached_rag.backends import thread as model_thread
from cached_rag.backends.base import Backend
from cached_rag.config import BatchConfig
from cached_rag.engine import prefill
from cached_rag.engine.batch import Batch, Work
from cached_rag.engine.prompt import UNPLANNED, Beginning
from cached_rag.engine.request import Request, Status
from cached_rag.engine.waiting import Waiting
from cached_rag.errors import ClosedError
from cached_rag.library.sequences import Sequences

_log = logging.getLogger(__name__)


class Scheduler:
    """Makes all answers of one model, whichever tenant's library their KV comes from."""

    def __init__(self, model: Backend, config: BatchConfig, sequences: Sequences) -> None:
        self.config = config
        self._model, self._sequences = model, sequences
        self._waiting = Waiting(config.max_waiting, config.max_wait_seconds)
        self._batch = Batch(model, config, self._waiting.put_back)
        self._open: set[Request] = set()  # all that were submitted and are not over
        self._is_closed = False
        self._turning = threading.Lock()
        self._cancelled: deque[Request] = deque()
        self._forgotten: deque[tuple[str, str, Sequence[int]]] = deque()
        self._driving = threading.Lock()
        self._driven: set[Request] = set()  # those whose answers the model's thread makes

    @property
    def num_running(self) -> int:
        """Number of requests that were admitted and are not over."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Number of requests that were not admitted yet."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of running requests; KV that they share counts once."""
        return self._batch.nbytes

    # From any thread -------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. It can be admitted once `read` has read its prompt.

        Raises:
            BusyError: too many requests wait already, or too long.
            ClosedError: the engine was closed.
        """
        if self._is_closed:
            raise ClosedError(
                "this engine was closed before the answer was begun; make another one, and close "
                "it only when it is not asked any more"
            )
        self._open.add(request)  # first: from then on it may end at any time
        try:
            self._waiting.add(request, max(0, self.config.max_rows - len(self._batch)))
        except BaseException:
            self._open.discard(request)
            raise

    def read(self, request: Request) -> None:
        """Read a queued request's prompt, on this thread. An error ends the request.

        The model's thread then makes the answer; but where the model may compute on this thread,
        whoever waits for the answer calls `turn`.
        """
        with self._failing(request):
            if request.is_wanted:
                prefill.read(request.prompt)
            if not model_thread.is_here():
                self.drive(request)

    def drive(self, request: Request) -> None:
        """Have the model's thread make this request's answer from now on, unless it is over."""
        with self._driving:
            if request.status.is_over:
                return
            if not self._driven:
                model_thread.submit(self._drive)
            self._driven.add(request)

    def cancel(self, request: Request) -> None:
        """End a request before its next token.

        Takes no lock that it would have to wait for, so the garbage collector may call it.
        """
        request.is_wanted = False
        self._cancelled.append(request)
        self._sweep_if_free()

    def forget(self, namespace: str, text_digest: str, token_ids: Sequence[int]) -> None:
        """Use no more KV of a tenant's prompts that contain a text, finished or running.

        Args:
            text_digest, token_ids: see `Sequences.forget`.
        """
        self._sequences.forget(namespace, text_digest, token_ids)
        self._forgotten.append((namespace, text_digest, token_ids))
        self._sweep_if_free()

    def close(self) -> None:
        """Take no other requests."""
        self._is_closed = True

    def cancel_all(self, is_meant: Callable[[Request], bool], seconds: float) -> None:
        """Cancel some of the requests, also one that is just being prefilled.

        What they leave is kept, if the turn that is being made ends in time. Not within a turn.

        Args:
            seconds: how long to wait for that.
        """
        meant = [request for request in list(self._open) if is_meant(request)]
        for request in meant:
            self.cancel(request)
        if meant and self._turning.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            try:
                self._sweep()
            finally:
                self._turning.release()

    # The life of a request: admit, run, take, finish -----------------------------------------

    @torch.inference_mode()
    def turn(self) -> None:
        """Admit requests, and run one step for all answers. On a thread that may use torch."""
        with self._turning:
            self._sweep()
            computed = self._admit()
            work = self._batch.work(computed)
            self._follow()
            self._run(work)
        self._sweep_if_free()

    def _admit(self) -> int:
        """Admit requests while there is room; returns how many prompt tokens that computed."""
        computed = 0
        while len(self._batch) < self.config.max_rows and computed < self.config.prefill_tokens:
            request = self._waiting.first()
            if request is None:
                break
            with self._failing(request):
                if not request.is_wanted:
                    self._finish(request, Status.CANCELLED)
                    continue
                if request.prompt.plan is UNPLANNED:  # once, however often there is no room yet
                    prefill.prepare(request.prompt)
                beginning = self._batch.beginning(request)
                if beginning.is_coming or not self._batch.has_room(request, beginning):
                    break
                self._waiting.admit(request)
                computed += self._start(request, beginning)
        return computed

    @contextlib.contextmanager
    def _failing(self, request: Request) -> Iterator[None]:
        """An error in here ends the request; an interrupt goes on besides."""
        try:
            yield
        except BaseException as error:
            self._finish(request, Status.FAILED, error)
            if not isinstance(error, Exception):
                raise

    def _start(self, request: Request, beginning: Beginning) -> int:
        """Begin a request's answer; returns how many prompt tokens that computed."""
        answered = list(request.decoding.token_ids)  # not empty if it was set back
        request.status = Status.PREFILLING
        request.begin_answer()
        others_wait = bool(len(self._waiting))
        computed = self._batch.begin(request, beginning, others_wait=others_wait)
        if not request.pending:  # else they are the prompt's own tokens: the batch computes them
            if answered:
                self._go_on(request, answered)
            else:
                self._take(request, request.prompt.logits)
        return computed

    def _run(self, work: Work) -> None:
        """Compute one pass, and take each request's next tokens.

        If the pass fails, its two halves are tried one after the other, down to the single request
        that is to blame. That is safe: what a failed pass wrote is written again, or lies behind
        the ends of its sequences, where nobody reads it.
        """
        if not work:
            return
        try:
            with self._model.lock:
                logits = self._model.step([one.step_input(count) for one, count in work])
        except Exception as error:
            if len(work) == 1:
                self._finish(work[0][0], Status.FAILED, error)
                return
            _log.warning("a pass for %d answers failed: %r; each half is tried", len(work), error)
        else:
            self._take_all(work, logits)
            return
        # Outside the `except`: the error holds the failed pass's tensors, and is gone only here.
        half = len(work) // 2
        self._run(work[:half])
        self._run(work[half:])

    def _take_all(self, work: Work, logits: torch.Tensor) -> None:
        """Take the next tokens of each request whose prompt is complete.

        Args:
            logits: (sum of the requests' wanted logits, vocab_size), see `Request.step_input`.
        """
        whole = [request for request, count in work if count == len(request.pending)]
        for request, count in work:
            request.computed(count)
        rows = torch.split(logits, [1 + len(request.draft) for request in whole])
        left = list(zip(whole, rows, strict=True))
        try:
            while left:
                self._take(*left.pop(0))
        except BaseException as error:  # the other requests have lost this step's token
            for request, _ in left:
                self._finish(request, Status.FAILED, error)
            raise

    def _take(
        self, request: Request, logits: torch.Tensor, followed: Sequence[int] | None = None
    ) -> None:
        """Take a request's next tokens; finish it if its answer ends with them; see `take`."""
        report, clock = request.prompt.report, request.prompt.asked.clock
        with self._failing(request):
            piece = request.take(logits, followed)
            request.status = Status.ANSWERING
            report.ttft_ms = report.ttft_ms or clock.total()
            if piece:
                request.deliver(piece)
            if request.decoding.finish_reason:
                self._finish(request, Status.FINISHED)
            else:
                self._batch.share(request)

    def _follow(self) -> None:
        """Compute answers' last tokens, and what they need of the prompt, where repair goes on."""
        for request in self._batch:
            if request.status is not Status.ANSWERING:
                continue
            with self._failing(request):
                followed = self._followed(request, request.prompt.held.answer)
                if followed is not None:
                    request.pending = []
                    self._take(request, *followed)

    def _followed(
        self, request: Request, token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]] | None:
        """Follow the last of an answer's tokens, if it is to be; see `Prefilling.follow`."""
        try:
            with self._model.lock:
                followed = request.prompt.follow(token_ids)
        except BaseException:
            request.prompt.repair = ""  # some layers may be missing of it, so it is not kept
            raise
        if followed is not None:
            request.prompt.kv.length += 1
        return followed

    def _go_on(self, request: Request, answer: list[int]) -> None:
        """Follow an answer that was set back once more, as far as it had come."""
        whole = request.decoding.token_ids
        while len(answer) > 1:
            followed = self._followed(request, whole[: len(whole) - len(answer) + 1])
            if followed is None:
                break
            _, draft = followed
            pairs = zip(draft, answer[1:-1], strict=False)  # the last one is still to be computed
            accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            request.prompt.kv.length += accepted
            answer = answer[1 + accepted :]
        request.pending = answer
        if request.prompt.is_following:  # its last token is computed alone
            request.status = Status.ANSWERING

    def _finish(self, request: Request, status: Status, last: BaseException | None = None) -> None:
        """End a request, waiting or running. All requests end here.

        Its memory is released, except for KV that other requests read.

        Args:
            last: the error to deliver; None if there is none.
        """
        if request.status.is_over:
            return
        self._open.discard(request)
        self._waiting.remove(request)
        request.prompt.report.output_tokens = len(request.decoding.token_ids)
        request.prompt.report.total_ms = request.prompt.asked.clock.total()
        try:
            self._batch.drop(request)
        except Exception:  # only caching failed: the answer is complete, and others go on
            _log.exception("what an answer left could not be kept")
        finally:
            request.finish(status, last)

    # Failing and sweeping --------------------------------------------------------------------

    def _drive(self) -> None:
        """Make one turn, and queue the next; in between the model's thread is free for others."""
        try:
            self.turn()
        except BaseException as error:  # else whoever waits for an answer would wait forever
            _log.exception("a turn failed; all requests fail with it")
            with self._turning:
                # A request that comes meanwhile is not to blame, so the list is made first.
                for request in list(self._open):
                    with contextlib.suppress(Exception):
                        self._finish(request, Status.FAILED, error)
        with self._driving:
            self._driven = {request for request in self._driven if not request.status.is_over}
            if self._driven:
                model_thread.submit(self._drive)

    def _sweep(self) -> None:
        """Do what `forget` and `cancel` have asked for."""
        while self._forgotten:
            text = self._forgotten.popleft()
            for request in (*self._batch, *self._waiting):  # of these, those that were set back
                request.prompt.forget(*text)
            self._sequences.forget(*text)  # prompts that ended in this turn
        while self._cancelled:
            self._finish(self._cancelled.popleft(), Status.CANCELLED)

    def _sweep_if_free(self) -> None:
        """Sweep, unless a turn is being made: whoever makes it sweeps after it."""
        while (self._cancelled or self._forgotten) and self._turning.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._turning.release()
