"""Picks tokens by logits, and turns them into text up to a stop string. Knows nothing of chunks.

The tests compare it with transformers' `generate()`, which is not used here: it needs a thread to
stream, and does not stop when its consumer does.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig
from cached_rag.grammar.grammar import Matcher, overlap


class Sampler:
    """Picks the next token by logits, as the config says: greedily, or at random."""

    def __init__(self, model: Backend, config: GenerationConfig) -> None:
        """Read the grammar of the answer, if it has one.

        Raises:
            MissingPackageError, ConfigError: see `Matcher`.
        """
        self._processors = _processors(model, config)
        self._is_greedy = config.temperature == 0
        self._penalties = config.presence_penalty, config.frequency_penalty
        self.matcher: Matcher | None = None
        if config.grammar is not None:
            self.matcher = Matcher(config.grammar, model.tokenizer, model.vocab_size, model.eos_ids)
        self._generator = torch.Generator(device=model.shapes.device)
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def __call__(self, token_ids: list[int], answered: int, logits: torch.Tensor) -> int:
        """The token after `token_ids`, given (1, vocab_size) logits.

        Args:
            answered: how many of the tokens are the answer's; the others are the prompt's.
        """
        scores = logits.float()
        if any(self._penalties) and answered:
            scores = self._penalised(scores, token_ids[-answered:])
        if self.matcher is not None:
            scores = self.matcher.masked(scores)
        if self._processors:
            ids = torch.tensor([token_ids], device=scores.device)
            scores = self._processors(ids, scores)
        if self._is_greedy:
            return int(scores.argmax(dim=-1))
        weights = scores.softmax(dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def _penalised(self, scores: torch.Tensor, answer: list[int]) -> torch.Tensor:
        """Scores less the penalties for tokens that the answer has already."""
        presence, frequency = self._penalties
        counts = Counter(answer)
        tokens = torch.tensor([*counts], device=scores.device)
        taken = [presence + frequency * count for count in counts.values()]
        return scores.index_add(1, tokens, -scores.new_tensor([taken]))


def _processors(model: Backend, config: GenerationConfig) -> LogitsProcessorList:
    own = model.repetition_penalty
    penalty = config.repetition_penalty or own or 1.0
    found = LogitsProcessorList()
    if penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(penalty))
    if config.temperature == 0:
        return found
    if config.temperature != 1.0:
        found.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        found.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        found.append(TopPLogitsWarper(config.top_p))
    return found


class Detokenizer:
    """Turns tokens into text, piece by piece. Holds back text that may begin a stop string."""

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], *, shows_control: bool = False
    ) -> None:
        """Begin a text.

        Args:
            stop: strings that end it.
            shows_control: control tokens stand in the text.
        """
        self._tokenizer = tokenizer
        self._skips = not shows_control
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=self._skips)
        self._stop = stop
        self._token_ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The new text that is certain after one more token; often empty."""
        self._token_ids.append(token)
        return self._release(self._decoded_by(token))

    def _decoded_by(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
            except Exception:  # the library's own, of no other type
                # Where tokens are single bytes, a byte that was a character by itself is one no
                # more before the first bytes of another. From here on all is decoded each time.
                self._stream = None
        return self._whole()[self._decoded :]

    def _whole(self) -> str:
        """All tokens as text, but for the first bytes of a character whose others are not there."""
        text = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skips))
        return text.rstrip("\ufffd")

    def flush(self) -> str:
        """The rest of the text, when no more tokens come: what was held back until now.

        That is the beginning of a stop string. Of a character of several tokens, whose last ones
        did not come, there is nothing to show.
        """
        text = self._release(self._whole()[self._decoded :])
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        self._decoded += len(new)
        self._held += new
        hits = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if hits:
            self.is_stopped = True
            text, self._held = self._held[: min(hits)], ""
            return text
        cut = len(self._held) - max((overlap(self._held, s) for s in self._stop), default=0)
        text, self._held = self._held[:cut], self._held[cut:]
        return text
