"""What is computed in full while nobody asks: audits of answers, and beginnings that come again.

Knows tokens, KV and logits; knows no method and no text.
"""

import math
import threading
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from cachetools import LRUCache
from xxhash import xxh3_128

from cached_rag.backends.base import Backend, exclusively
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV
from cached_rag.library.learning import Learning, WriteBack
from cached_rag.library.plan import Plan
from cached_rag.library.sequences import Ids, PromptKV, Sequences

# Of each method the last audits count, and a method is judged by so many at least.
_KEPT, _LEAST = 64, 8
_METHODS = 64
# Tokens computed at a time; a request that comes meanwhile waits for so many at most.
_PIECE = 512
# Beginnings that are remembered, as digests.
_REMEMBERED = 4096


@dataclass(frozen=True)
class Audit:
    """What the last audits of a method found.

    Attributes:
        count: how many there were, up to 64.
        kl: mean divergence of the first token's distribution from full prefill's, in nats.
        agreement: share of them with the same likeliest token.
    """

    count: int
    kl: float
    agreement: float


class Audits:
    """The audits of one model. Safe for several threads.

    For a sample of requests, first tokens are compared with full prefill's. Whether reuse is
    harmless on the model and texts at hand is so measured where it matters. A method whose answers
    begin otherwise than they should, more than the limit allows, is used no more.
    """

    def __init__(self, rate: float, limit: float) -> None:
        """Start with none.

        Args:
            rate: share of the requests to audit, 0 to 1.
            limit: mean divergence, in nats, past which a method is used no more.
        """
        self._rate, self._limit = rate, limit
        self._due = 0.0
        self._found: LRUCache[str, deque[tuple[float, bool]]] = LRUCache(_METHODS)
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Whether the request that asks is to be audited."""
        if not self._rate:
            return False
        with self._lock:
            self._due += self._rate
            is_due = self._due >= 1
            self._due -= is_due
            return is_due

    def compare(self, method: str, model: Backend, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Audit an answer's first logits; see `compare`."""
        kl, agrees = exclusively(model, partial(compare, model, ids, logits))
        self.note(method, kl, agrees=agrees)

    def note(self, method: str, kl: float, *, agrees: bool) -> None:
        """Take over what an audit found."""
        with self._lock:
            if method not in self._found:
                self._found[method] = deque(maxlen=_KEPT)
            self._found[method].append((kl, agrees))

    def found(self) -> dict[str, Audit]:
        """What was found of each method that was audited."""
        with self._lock:
            return {method: _summary(list(rows)) for method, rows in self._found.items()}

    def objection(self, method: str) -> str:
        """Why a method is used no more; empty if it is."""
        audit = self.found().get(method) if self._rate else None
        if audit is None or audit.count < _LEAST or audit.kl <= self._limit:
            return ""
        return (
            f"{method} is used no more, and all is computed: its first tokens differed from full "
            f"prefill's by {audit.kl:.2f} nats in the last {audit.count} audits, and "
            f"audit_limit is {self._limit:g}"
        )


def _summary(rows: list[tuple[float, bool]]) -> Audit:
    divergences, agreements = zip(*rows, strict=True)
    count = len(rows)
    return Audit(count, sum(divergences) / count, sum(agreements) / count)


def compare(model: Backend, ids: torch.Tensor, logits: torch.Tensor) -> tuple[float, bool]:
    """How logits differ from full prefill's: the divergence in nats, and whether the top agrees.

    Args:
        ids: (1, seq_len) int64, the prompt.
        logits: (vocab_size,), of the token behind it.
    """
    buffer = KVBuffer.like(model.shapes, ids.shape[1])
    full = model.prefill(buffer, ids).logits[-1].float().log_softmax(-1)
    own = logits.float().log_softmax(-1)
    kl = float((full.exp() * (full - own)).sum())
    # Logits that are no numbers are as far away as can be.
    return math.inf if math.isnan(kl) else max(0.0, kl), bool(full.argmax() == own.argmax())


class Settling:
    """What the prompts of one model began with lately. Safe for several threads.

    A chat about one document, a page of frequent questions: there the same chunks stand in the same
    order at the beginning of every prompt. Reuse and repair would be paid for each time, and a
    plain prefix cache would do better. So the second time that a prompt begins so, the beginning is
    prefilled in full in the background, and kept. From then on it is reused without loss and
    without repair.
    """

    def __init__(self, model: Backend, sequences: Sequences, *, is_on: bool = True) -> None:
        self._model, self._sequences = model, sequences
        self._is_on = is_on and bool(sequences.keeps_repaired)
        self._seen: LRUCache[tuple[str, bytes], bool] = LRUCache(_REMEMBERED)
        self._lock = threading.RLock()  # as in `Activity`

    def see(self, learning: Learning, ids: Ids, plan: Plan, settled: int) -> None:
        """Take note of a prompt that was answered; if it begins as another did, offer the work.

        Args:
            learning: has the background queue.
            settled: number of the prompt's tokens, from the first, that were exact, or kept.
        """
        if not self._is_on or learning.write_back is None:
            return
        namespace = learning.library.namespace
        length = self._again(namespace, ids, plan)
        needed = length * self._model.shapes.bytes_per_token
        if length <= settled or needed > self._sequences.max_bytes:
            return
        _, kept = self._sequences.beginning(namespace, ids[:length])
        if kept < length:
            work = _Work(self._model, self._sequences, learning, namespace, ids[:length], plan)
            work.offer(learning.write_back)

    def _again(self, namespace: str, ids: Ids, plan: Plan) -> int:
        """Tokens of the longest beginning that ends with a chunk and was there before; 0: none."""
        hashed, done, length = xxh3_128(), 0, 0
        with self._lock:
            for _, end in plan.chunks:
                hashed.update(np.ascontiguousarray(ids[done:end]).tobytes())
                done, name = end, (namespace, hashed.digest())
                length = end if name in self._seen else length
                self._seen[name] = True
        return length


@dataclass(eq=False)
class _Work:
    """One beginning that is computed piece by piece, in `buffer`; `done` tokens of it are."""

    model: Backend
    sequences: Sequences
    learning: Learning
    namespace: str
    ids: Ids
    plan: Plan
    done: int = 0

    def offer(self, write_back: WriteBack) -> None:
        """Have the next piece computed when nobody asks."""
        name = ("settle", self.namespace, self.ids.tobytes(), self.done)
        go_on = partial(self._go_on, write_back)
        write_back.offer(name, go_on, lasts=False, is_begun=self.done > 0)

    def _go_on(self, write_back: WriteBack) -> None:
        exclusively(self.model, self._compute)
        if self.done < len(self.ids):
            self.offer(write_back)
        else:
            self._keep()

    @cached_property
    def buffer(self) -> KVBuffer:
        """Taken when the work is begun, with what is there already, and exact; sets `done`."""
        buffer = KVBuffer.like(self.model.shapes, len(self.ids))
        kept, self.done = self.sequences.beginning(self.namespace, self.ids)
        for run in kept.cut(self.done) if kept else ():
            part = run.module(self.ids[run.slot : run.slot + len(run)].tolist())
            buffer.place(part, run.slot, self.model.rule)
        return buffer

    def _compute(self) -> None:
        buffer = self.buffer  # first, as that may set `done`
        end = min(self.done + _PIECE, len(self.ids))
        if end > self.done:
            slots = torch.arange(self.done, end)
            known = torch.from_numpy(self.ids[None, :end])
            self.model.prefill(buffer, known, slots, num_logits=0)
        self.done = end

    def _keep(self) -> None:
        count = len(self.ids)
        chunks = tuple(chunk for chunk in self.plan.chunks if chunk[1] <= count)
        settled = PromptKV(self.namespace, self.ids, (), count, "", chunks)
        self.learning.keep(self.sequences, settled, RowKV(self.buffer, count), self.plan)
