"""Decoding: from logits to the answer's tokens and pieces of text, for one prompt.

`answer_alone` is the plain loop that answers one prompt. The scheduler does the same for many, and
the tests compare the two.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from cached_rag.backends.base import Backend, StepInput
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import GenerationConfig
from cached_rag.engine.prompt import Prefilling
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.trace import Trace, TraceSource
from cached_rag.grammar.grammar import Matcher, overlap
from cached_rag.kv.rows import RowKV


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
    penalty = config.repetition_penalty or model.repetition_penalty
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


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was where it stands, by the model's logits as they are.

    Attributes:
        logprob: natural logarithm of the token's probability.
        top: the likeliest tokens there, the first first, and theirs.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def shown_logprob(tokenization: Tokenization, token: int, logprob: float) -> dict[str, Any]:
    """A token and its log probability in OpenAI's form."""
    spelled = tokenization.spelled(token)
    text = spelled.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def shown_logprobs(by: Tokenization, found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Tokens in OpenAI's form, each with the likeliest ones at its place."""
    return [
        shown_logprob(by, at.token, at.logprob)
        | {"top_logprobs": [shown_logprob(by, *pair) for pair in at.top]}
        for at in found
    ]


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: its tokens, without the one that ends an answer.
        finish_reason: "stop" (the model ended it, or a stop string came), "length" (it has
            `max_tokens` tokens) or "cancelled".
        report: what was reused and computed, and how long it took.
        logprobs: one for each token, if they were asked for.
        trace_source: what `trace` is made of.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: Report
    logprobs: tuple[TokenLogprobs, ...] = ()
    trace_source: TraceSource | None = field(default=None, compare=False, repr=False)

    @property
    def trace(self) -> Trace | None:
        """What became of each of the prompt's tokens; `Explanation` shows it."""
        return self.trace_source.trace if self.trace_source else None


class Decoding:
    """An answer that is being made.

    Attributes:
        token_ids: the answer's tokens so far; others may watch the list grow.
        finish_reason: see `Generation`; None until it is complete.
        logprobs: see `Generation`.
    """

    def __init__(self, model: Backend, config: GenerationConfig) -> None:
        self._ids: list[int] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._eos_ids = frozenset() if config.ignore_eos else model.eos_ids
        self._config = config
        self.logprobs: list[TokenLogprobs] = []
        self._sampler = Sampler(model, config)
        shows = config.shows_control
        self._text = Detokenizer(model.tokenizer, config.stop, shows_control=shows)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Set the prompt that is answered, before the first token is taken."""
        self._ids = list(prompt_ids)

    def take(self, logits: torch.Tensor) -> str:
        """Pick the next token by (1, vocab_size) logits; returns the text that is now certain."""
        token = self._sampler(self._ids, len(self.token_ids), logits)
        if token in self._eos_ids:
            self.finish_reason = "stop"
            return self._text.flush()
        if self._config.logprobs is not None:
            self.logprobs.append(_logprobs(token, logits[0], self._config.logprobs))
        self.token_ids.append(token)
        self._ids.append(token)
        piece, matcher = self._text.push(token), self._sampler.matcher
        if matcher is not None:
            matcher.take(token)
        if self._text.is_stopped or (matcher is not None and matcher.is_complete):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._config.max_tokens:
            self.finish_reason = "length"
        return piece + (self._text.flush() if self.finish_reason else "")

    def forced(self, most: int) -> list[int]:
        """Tokens that come next by the answer's grammar, whatever the model says; often none."""
        room = min(most, self._config.max_tokens - len(self.token_ids) - 1)
        matcher = self._sampler.matcher
        return matcher.forced(room) if matcher is not None and room > 0 else []

    def take_drafted(self, logits: torch.Tensor, draft: Sequence[int]) -> tuple[str, int]:
        """Pick the next tokens, as long as they are the drafted ones, and one more.

        Each is picked by its logits as without a draft, at random too. So a drafted token x stays
        with the probability p(x) that the model gives it, and another one comes with its own: the
        acceptance rule of speculative sampling, for drafts that are certain of their tokens.

        Args:
            logits: (1 + len(draft), vocab_size), after the last token and after each drafted one.

        Returns:
            The text that is now certain, and how many drafted tokens the answer went on behind.
        """
        accepted, text = 0, self.take(logits[:1])
        for token in draft:
            if self.finish_reason is not None or self.token_ids[-1] != token:
                break
            accepted += 1
            text += self.take(logits[accepted : accepted + 1])
        return text, accepted


def _logprobs(token: int, logits: torch.Tensor, top: int) -> TokenLogprobs:
    found = logits.float().log_softmax(dim=-1)
    best = found.topk(top)
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token, float(found[token]), likeliest)


@torch.inference_mode()
def answer_alone(model: Backend, prefill: Prefilling, config: GenerationConfig) -> Generation:
    """Answer a prefilled prompt, token after token. The caller releases the prefill.

    Raises:
        As the model does.
    """
    clock = Clock()
    answer = Decoding(model, config)
    answer.begin(prefill.tokens.ids)
    kv = RowKV(prefill.kv.own, len(prefill.tokens))
    text = answer.take(prefill.logits)
    while answer.finish_reason is None:
        with model.lock:
            followed = prefill.follow(answer.token_ids)
            if followed is None:
                followed = model.step([StepInput(kv, answer.token_ids[-1:])]), []
            else:
                kv.length += 1
        piece, accepted = answer.take_drafted(*followed)
        kv.length += accepted
        text += piece
    prefill.report.output_tokens = len(answer.token_ids)
    prefill.report.total_ms = prefill.report.ttft_ms + clock.total()
    ids, logprobs = tuple(answer.token_ids), tuple(answer.logprobs)
    return Generation(text, ids, answer.finish_reason, prefill.report, logprobs)
