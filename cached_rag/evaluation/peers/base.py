"""What a peer is: something that answers the benchmark's prompts. Knows no implementation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cached_rag.backends.prompt_text import Rendered


@dataclass(frozen=True)
class Question:
    """A prompt, the same one for all peers.

    Attributes:
        prompt: as text, in which this library finds its chunks.
        ids: its tokens, which all others are given.
    """

    prompt: Rendered
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        ttft_ms, total_ms: milliseconds from asking to the first token, and to the last.
        token_ids: the answer's tokens.
        gaps_ms: milliseconds between its pieces, as they came; empty if they came as one.
    """

    ttft_ms: float
    total_ms: float
    token_ids: tuple[int, ...]
    gaps_ms: tuple[float, ...] = ()

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token after the first; 0 if there is none."""
        return (self.total_ms - self.ttft_ms) / max(1, len(self.token_ids) - 1)


class Peer(ABC):
    """A program, or a way of this library, that answers prompts one after another.

    Attributes:
        about: what it is: version, weights, settings.
        plain: name of the peer that does the same without what this one learns; empty for none.
    """

    about: str
    plain: str = ""

    @abstractmethod
    def answer(self, question: Question, max_tokens: int) -> Sample:
        """Answer greedily with exactly so many tokens, and go on where the model would end."""

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Read what prompts will have behind their head, if it can before they come."""
        return

    def settle(self) -> None:
        """Finish what an answer left for later, so that it does not disturb the next peer."""
        return

    def close(self) -> None:
        """Free its memory. It is not asked again."""
        return


class Stopwatch:
    """Times one answer; it is started when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._came_ms: list[float] = []
        self._token_ids: list[int] = []

    def add(self, *token_ids: int) -> None:
        """Take note of tokens, in the moment when they are there."""
        if token_ids:
            self._came_ms.append(self._passed_ms())
        self._token_ids += token_ids

    def sample(self) -> Sample:
        """The answer, in the moment when it is complete."""
        passed, came = self._passed_ms(), self._came_ms
        gaps = tuple(later - earlier for earlier, later in pairwise(came))
        return Sample(came[0] if came else passed, passed, tuple(self._token_ids), gaps)

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000
