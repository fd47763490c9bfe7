"""Decode steps of concurrent answers, gathered into batches.

A lone answer steps by itself. As soon as there are several, the model's thread makes the steps of
all of them together: a batch of a few rows costs little more than one. Knows when rows step
together; knows no text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cached_rag import model_thread
from cached_rag.batch_step import NextToken, step_batch
from cached_rag.model import LanguageModel

# How long a batch waits for rows that were in the one before. Sampling takes far less; a consumer
# that pauses takes longer, and must not hold up the others.
_PATIENCE = 0.004

Pick = Callable[[torch.Tensor], int]


@dataclass
class _Waiting:
    seat: Seat
    last: NextToken
    pick: Pick
    token: Future[int]


class Seat:
    """One answer's place among those that step together."""

    def __init__(self, step: Callable[[Seat, NextToken, Pick], int]) -> None:
        self._step = step

    def step(self, last: NextToken, pick: Pick) -> int:
        """The token that `pick` takes by the (1, vocab_size) logits after `last`."""
        return self._step(self, last, pick)


class Stepper:
    """Steps on one model; `lock` is held while it is used."""

    def __init__(self, model: LanguageModel, lock: threading.Lock) -> None:
        self._model, self._lock = model, lock
        self._changed = threading.Condition()
        self._seats = 0
        self._waiting: list[_Waiting] = []
        self._expected: set[Seat] = set()

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """Take part in stepping, from an answer's first token to its last."""
        with self._changed:
            self._seats += 1
        seat = Seat(self._step)
        try:
            yield seat
        finally:
            with self._changed:
                self._seats -= 1
                self._expected.discard(seat)
                self._changed.notify_all()

    def _step(self, seat: Seat, last: NextToken, pick: Pick) -> int:
        waiting = _Waiting(seat, last, pick, Future())
        with self._changed:
            is_alone = self._seats == 1
            if not is_alone:
                self._waiting.append(waiting)
                self._changed.notify_all()
                if len(self._waiting) == 1:
                    model_thread.submit(self._serve)
        if is_alone:
            model_thread.on_model_thread(lambda: self._run([waiting]))
        return waiting.token.result()

    def _serve(self) -> None:
        """One step of all that wait. Between two of them the thread is free for other work."""
        self._run(self._gather())

    def _run(self, batch: Sequence[_Waiting]) -> None:
        try:
            with self._lock:
                logits = step_batch(self._model, [one.last for one in batch])
        except BaseException as error:
            for one in batch:
                one.token.set_exception(error)
            return
        for row, one in enumerate(batch):
            _settle(one, logits[row : row + 1])

    def _gather(self) -> list[_Waiting]:
        with self._changed:
            patient_until = time.monotonic() + _PATIENCE
            while not self._expected <= {one.seat for one in self._waiting}:
                if not self._changed.wait(max(0.0, patient_until - time.monotonic())):
                    break
            batch, self._waiting = self._waiting, []
            self._expected = {one.seat for one in batch}
            return batch


def _settle(waiting: _Waiting, logits: torch.Tensor) -> None:
    try:
        waiting.token.set_result(waiting.pick(logits))
    except BaseException as error:
        waiting.token.set_exception(error)
