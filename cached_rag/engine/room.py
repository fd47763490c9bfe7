"""Whether the KV of answers fits `BatchConfig.max_bytes`. Knows sizes; changes nothing."""

from __future__ import annotations

from cached_rag.engine.request import Request
from cached_rag.engine.sharing import Beginning, Sharing
from cached_rag.errors import ContextOverflowError


class Room:
    """What is left of the bytes that running answers may take."""

    def __init__(self, bound: int | None, each: int, sharing: Sharing) -> None:
        """Leave all room.

        Args:
            bound: most bytes; None for any number.
            each: bytes of a token's KV.
            sharing: knows what running answers have now.
        """
        self._bound, self._each, self._sharing = bound, each, sharing

    def has(self, tokens: int) -> bool:
        """Whether the KV of so many more tokens fits."""
        return self._has_bytes(tokens * self._each)

    def _has_bytes(self, nbytes: int) -> bool:
        return self._bound is None or self._sharing.nbytes + nbytes <= self._bound

    def admits(self, request: Request, beginning: Beginning, *, shares: bool) -> bool:
        """Whether the KV of a prompt and the beginning of its answer fits.

        Args:
            shares: the batch computes it behind `beginning`, which then takes no more room.
        """
        count = len(request.tokens) + request.room
        if shares:
            return self._has_bytes(self._sharing.cost(beginning, count))
        return self.has(request.resources.workspace.size(count))

    def check(self, request: Request) -> None:
        """Check that a prompt and its whole answer would fit if nothing else ran.

        Raises:
            ContextOverflowError: they do not.
        """
        if self._bound is None:
            return
        needed = (len(request.tokens) + request.config.max_tokens) * self._each
        if needed > self._bound:
            raise ContextOverflowError(
                f"prompt and answer need {needed} bytes of KV, and BatchConfig.max_bytes "
                f"is {self._bound}; raise it, retrieve less, or lower max_tokens"
            )
