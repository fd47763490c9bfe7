"""Measures one prompt with one method: the answer, its likelihood, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.prompt_text import Message
from cached_rag.backends.thread import on_model_thread
from cached_rag.config import GenerationConfig
from cached_rag.engine.decoding import PrefilledRequest, answer_alone
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Clock
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.metrics import exact_match, f1, rouge_l
from cached_rag.evaluation.texts import check_prompts_are_new
from cached_rag.pml import SchemaPrompt


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        text: the generated answer; None if no answer was wanted.
        nll: mean negative log likelihood of the reference answer's tokens; None without reference.
        own_nll: the same of the generated answer; None without one.
        log_probs: (vocab_size,) float32, log probabilities of the answer's first token.
        along: (answer_len, vocab_size) float32, the same of each token of the reference answer,
            given those before it; None without reference.
        charged_recompute, ttft_ms, total_ms: as in `Report`.
    """

    text: str | None
    nll: float | None
    own_nll: float | None
    log_probs: torch.Tensor
    along: torch.Tensor | None
    charged_recompute: float
    ttft_ms: float
    total_ms: float


def read(
    engine: Engine,
    prompt: Sequence[Message] | SchemaPrompt,
    config: GenerationConfig,
    reference: str | None,
    *,
    generates: bool = True,
) -> Measurement:
    """Prefill a prompt, generate an answer, and compute the likelihood of the reference.

    Args:
        reference: the reference answer; None for none.
        generates: keep the generated answer; else only likelihoods and times are measured.

    Raises:
        ConfigError: the engine keeps finished prompts.
    """
    return read_on(
        engine, lambda: engine.prefill(prompt, config), config, reference, generates=generates
    )


def read_on(
    engine: Engine,
    prefill_prompt: Callable[[], PrefilledRequest],
    config: GenerationConfig,
    reference: str | None,
    *,
    generates: bool = True,
) -> Measurement:
    """As `read`, for a prompt that `prefill_prompt` prefills."""
    check_prompts_are_new(engine)
    shown = config if generates else config.replace(max_tokens=1)
    clock = Clock()
    prefill = prefill_prompt()
    report = prefill.report
    report.ttft_ms = clock.total()
    charged = report.charged_recompute
    text = on_model_thread(lambda: answer_alone(engine.model, prefill, shown)).text
    if report.charged_recompute != charged:  # repair went on; the reference has one of its own
        prefill.release()
        prefill = prefill_prompt()
        prefill.report.ttft_ms, prefill.report.total_ms = report.ttft_ms, report.total_ms
    return _scored(engine, prefill_prompt, prefill, config, reference, text if generates else None)


def score(
    engine: Engine,
    prompt: Sequence[Message],
    config: GenerationConfig,
    reference: str | None,
    text: str,
) -> Measurement:
    """As `read`, for an answer `text` that was generated elsewhere; times are not measured."""
    check_prompts_are_new(engine)

    def prefill_prompt() -> PrefilledRequest:
        return engine.prefill(prompt, config)

    return _scored(engine, prefill_prompt, prefill_prompt(), config, reference, text)


def _scored(
    engine: Engine,
    prefill_prompt: Callable[[], PrefilledRequest],
    prefill: PrefilledRequest,
    config: GenerationConfig,
    reference: str | None,
    text: str | None,
) -> Measurement:
    report = prefill.report
    plain = report.charged_recompute
    try:
        log_probs = prefill.logits[0].float().log_softmax(-1)
        told = _told(engine, prefill, reference, config) if reference else None
        if text and report.charged_recompute != plain:  # it was repaired for the reference
            prefill.release()
            prefill = prefill_prompt()
        own = _told(engine, prefill, text, config) if text else None
    finally:
        prefill.release()
    charged, ttft_ms = report.charged_recompute, report.ttft_ms
    nll, along = told or (None, None)
    own_nll = own[0] if own else None
    return Measurement(text, nll, own_nll, log_probs, along, charged, ttft_ms, report.total_ms)


@torch.inference_mode()
def _told(
    engine: Engine, prefill: PrefilledRequest, text: str, config: GenerationConfig
) -> tuple[float, torch.Tensor] | None:
    """How likely a prefilled prompt makes an answer, which the model is told (teacher forcing).

    Returns:
        The mean negative log likelihood per token, and `Reading.along`, of `max_tokens` at most.
        None for an empty answer.
    """
    answer = engine.tokenization.literal(text.strip()).ids[: config.max_tokens]
    if not answer:
        return None
    scores = [prefill.logits]
    while len(scores) < len(answer):
        logits = prefill.follow(answer[: len(scores)])
        if logits is None:
            break
        scores.append(logits)
    if left := len(answer) - len(scores):
        assert prefill.buffer is not None
        ids = torch.tensor([[*prefill.tokens.ids, *answer[:-1]]])
        slots = torch.arange(ids.shape[1] - left, ids.shape[1])
        rest = engine.model.prefill(prefill.buffer, ids, slots, num_logits=left)
        scores.append(rest.tail[0])
    log_probs = torch.cat(scores).float().log_softmax(-1)
    wanted = torch.tensor(answer, device=log_probs.device)[:, None]
    return -float(log_probs.gather(1, wanted).mean()), log_probs


def figures(
    reading: Measurement, full: Measurement, answers: Sequence[str]
) -> dict[str, float | None]:
    """A measurement as numbers, compared with full prefill of the same prompt.

    Returns:
        f1, em, rouge_l (None without an answer or a reference), nll (None without a reference),
        kl (divergence of the first token's distribution from full prefill's), kl_along (mean of
        that over the reference's tokens, None without it), entropy (of the first token, nats),
        agreement (1 if the likeliest first token is full prefill's, else 0), charged_recompute,
        ttft_ms.
    """
    scored = reading.text is not None and bool(answers)
    text = reading.text or ""
    return {
        "f1": f1(text, answers) if scored else None,
        "em": exact_match(text, answers) if scored else None,
        "rouge_l": rouge_l(text, answers) if scored else None,
        "nll": reading.nll,
        "kl": divergence(full.log_probs, reading.log_probs),
        "kl_along": divergence(full.along, reading.along),
        "entropy": -float((reading.log_probs.exp() * reading.log_probs).sum()),
        "agreement": float(reading.log_probs.argmax() == full.log_probs.argmax()),
        "charged_recompute": reading.charged_recompute,
        "ttft_ms": reading.ttft_ms,
        "full_ttft_ms": full.ttft_ms,
    }


def divergence(full: torch.Tensor | None, other: torch.Tensor | None) -> float | None:
    """Mean divergence of (..., vocab_size) log probabilities from full prefill's, if both are.

    Raises:
        EvaluationError: some are no numbers.
    """
    if full is None or other is None:
        return None
    if full.isnan().any() or other.isnan().any():
        raise EvaluationError("the model's logits are no numbers; try another dtype")
    terms = full.exp() * (full - other)
    found = float(terms.masked_fill(full.isneginf(), 0.0).sum(-1).mean())
    return max(0.0, found)
