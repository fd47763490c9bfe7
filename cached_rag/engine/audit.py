"""Compares first tokens with full prefill's, for a sample of requests, while nobody asks.

Whether reuse is harmless on the model and texts at hand is so measured where it matters. A method
whose answers begin otherwise than they should, more than the limit allows, is used no more. Knows
logits; knows no text.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass

import torch
from cachetools import LRUCache

from cached_rag.backends.base import Backend
from cached_rag.kv.buffer import KVBuffer

# Of each method the last audits count, and a method is judged by so many at least.
_KEPT, _LEAST = 64, 8
_METHODS = 64


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
    """The audits of one model. Safe for several threads."""

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
    with model.lock, torch.inference_mode():
        buffer = KVBuffer.like(model.shapes, ids.shape[1])
        full = model.prefill(buffer, ids).logits[-1].float().log_softmax(-1)
        own = logits.float().log_softmax(-1)
        kl = float((full.exp() * (full - own)).sum())
        # Logits that are no numbers are as far away as can be.
        return math.inf if math.isnan(kl) else max(0.0, kl), bool(full.argmax() == own.argmax())
