"""A framework's model as a peer: it is given the prompt as text, and streams text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

from cached_rag.errors import ModelError
from docs.experiments.answers import Peer, Question, Sample, Stopwatch

# Its threads are new for each answer, and the last one's helpers end when they have been idle for
# a second; until then they take turns with the next peer's (`backends/thread.py`).
_PAUSE_S = 1.2


class TextPeer(Peer):
    """Times pieces of text; their tokens are those of the text as a whole."""

    def __init__(
        self,
        about: str,
        tokenizer: PreTrainedTokenizerBase,
        stream: Callable[[str, int], Iterator[str]],
    ) -> None:
        """Name it.

        Args:
            stream: answers a prompt with so many tokens, in pieces.
        """
        self.about, self._tokenizer, self._stream = about, tokenizer, stream

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ModelError: its tokenizer reads the prompt as other tokens.
        """
        text = question.prompt.text
        if tuple(self._tokenizer(text)["input_ids"]) != question.ids:
            raise ModelError(f"{self.about} reads the prompt as other tokens than the other peers")
        watch, pieces = Stopwatch(), []
        for piece in self._stream(text, max_tokens):
            pieces.append(piece)
            if piece:
                watch.add(0)
        timed = watch.sample()
        said = self._tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
        ids = tuple(said[:max_tokens])
        return Sample(timed.ttft_ms, timed.total_ms, ids, timed.gaps_ms)

    def settle(self) -> None:
        """Wait for the threads that it used."""
        time.sleep(_PAUSE_S)
