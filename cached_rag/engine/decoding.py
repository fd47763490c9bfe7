"""An answer as it is made: logits in, tokens and pieces of text out.

`answer_alone` is the plain loop around it, the scheduler's twin. Knows one prompt; knows no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.base import Backend, StepInput
from cached_rag.backends.tokenizer import Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.sampling import Detokenizer, Sampler
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV
from cached_rag.library.plan import Placement


@dataclass(frozen=True)
class Generation:
    """An answer: its text, its tokens, why it ended, and the report.

    It ends with "stop" (the model's own end, or a stop string), "length" or "cancelled".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: Report


@dataclass
class Prefill:
    """A prompt whose KV is complete. `release` it, so that the next request can use its memory.

    Attributes:
        logits: (1, vocab_size) after the last prompt token.
        buffer: KV of all `tokens`, with room for the answer.
        remember: keeps of the buffer what may serve later prompts.
        give_back: hands the buffer back, when nobody reads it any more.
        is_over: says that the request is no longer under way.
        rows: slots of the tokens that were computed in every layer; the others are cached.
        as_they_are: cached KV that nothing was repaired in, in memory.
        exact_length: tokens from the first whose KV is what full prefill computes.
    """

    tokens: Tokens
    logits: torch.Tensor
    buffer: KVBuffer
    report: Report
    remember: Callable[[], None]
    give_back: Callable[[], None]
    is_over: Callable[[], None]
    rows: torch.Tensor
    as_they_are: tuple[Placement, ...] = ()
    exact_length: int = 0

    def release(self) -> None:
        """The answer is complete, or nobody wants it."""
        self.remember()
        self.give_back()
        self.is_over()


class Answering:
    """One answer in the making.

    Attributes:
        token_ids: the answer's tokens so far; others may watch the list grow.
        finish_reason: see `Generation`; None until it is complete.
    """

    def __init__(
        self,
        model: Backend,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        token_ids: list[int] | None = None,
    ) -> None:
        self.token_ids: list[int] = [] if token_ids is None else token_ids
        self.finish_reason: str | None = None
        self._eos_ids = frozenset() if config.ignore_eos else model.eos_ids
        self._max_tokens = config.max_tokens
        self._sampler = Sampler(model, config)
        self._text = Detokenizer(model.tokenizer, config.stop)
        self._ids = list(prompt_ids)

    def take(self, logits: torch.Tensor) -> str:
        """Pick the next token by (1, vocab_size) logits; the text that is certain with it."""
        token = self._sampler(self._ids, logits)
        if token in self._eos_ids:
            self.finish_reason = "stop"
            return self._text.flush()
        self.token_ids.append(token)
        self._ids.append(token)
        piece = self._text.push(token)
        if self._text.is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._max_tokens:
            self.finish_reason = "length"
            piece += self._text.flush()
        return piece


@torch.inference_mode()
def answer_alone(model: Backend, prefill: Prefill, config: GenerationConfig) -> Generation:
    """The answer to a prefilled prompt, token after token; the prefill is not released.

    Raises:
        As the model does.
    """
    clock = Clock()
    answer = Answering(model, prefill.tokens.ids, config)
    kv = RowKV(prefill.buffer, len(prefill.tokens))
    text = answer.take(prefill.logits)
    while answer.finish_reason is None:
        with model.lock:
            logits = model.step([StepInput(kv, answer.token_ids[-1:])])
        text += answer.take(logits)
    prefill.report.output_tokens = len(answer.token_ids)
    prefill.report.total_ms = prefill.report.ttft_ms + clock.total()
    return Generation(text, tuple(answer.token_ids), answer.finish_reason, prefill.report)
