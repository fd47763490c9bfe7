"""Measures one prompt with one method: the answer, its scores and likelihood, and what it cost.

F1 and EM (exact match) are those of SQuAD v1.1: texts are compared in lower case, without
punctuation and articles, and the best score over the references counts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.prompt_text import Message
from cached_rag.backends.thread import on_model_thread
from cached_rag.config import GenerationConfig
from cached_rag.engine.decoding import answer_alone
from cached_rag.engine.engine import Engine
from cached_rag.engine.prompt import Prefilling
from cached_rag.engine.report import Clock
from cached_rag.errors import EvaluationError, needs_extra
from cached_rag.evaluation.timing import check_prompts_are_new
from cached_rag.pml import SchemaPrompt

with needs_extra("bench", "evaluation"):
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        text: the generated answer; None if no answer was wanted.
        nll: mean negative log likelihood of the reference answer's tokens; None without reference.
        log_probs: (vocab_size,) float32, log probabilities of the answer's first token.
        along: (answer_len, vocab_size) float32, the same of each token of the reference answer,
            given those before it; None without reference.
        charged_recompute, ttft_ms: as in `Report`.
    """

    text: str | None
    nll: float | None
    log_probs: torch.Tensor
    along: torch.Tensor | None
    charged_recompute: float
    ttft_ms: float


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
        generates: generate an answer; else only likelihoods and times are measured.

    Raises:
        ConfigError: the engine keeps finished prompts.
    """
    check_prompts_are_new(engine)
    clock = Clock()
    prefill = engine.prefill(prompt, config)
    ttft_ms, charged = clock.total(), prefill.report.charged_recompute
    text = None
    if generates:
        text = on_model_thread(lambda: answer_alone(engine.model, prefill, config)).text
        if prefill.report.charged_recompute != charged:  # repair went on; the reference's is apart
            prefill.release()
            prefill = engine.prefill(prompt, config)
    try:
        log_probs = prefill.logits[0].float().log_softmax(-1)
        told = _told(engine, prefill, reference, config) if reference else None
    finally:
        prefill.release()
    nll, along = told or (None, None)
    return Measurement(text, nll, log_probs, along, prefill.report.charged_recompute, ttft_ms)


@torch.inference_mode()
def _told(
    engine: Engine, prefill: Prefilling, text: str, config: GenerationConfig
) -> tuple[float, torch.Tensor] | None:
    """How likely a prefilled prompt makes an answer, which the model is told (teacher forcing).

    Returns:
        The mean negative log likelihood per token, and `Measurement.along`, of `max_tokens` at
        most. None for an empty answer.
    """
    answer = engine.tokenization.literal(text.strip()).ids[: config.max_tokens]
    if not answer:
        return None
    scores = [prefill.logits]
    while left := len(answer) - sum(map(len, scores)):
        followed = prefill.follow(answer[:-left], answer[-left:-1])
        if followed is None:
            break
        scores.append(followed[0])
    if left:
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
        that over the reference's tokens, None without it), agreement (1 if the likeliest first
        token is full prefill's, else 0), charged_recompute, ttft_ms.
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


def normalise(text: str) -> list[str]:
    """An answer's words, as SQuAD compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, else 0."""
    return float(any(normalise(answer) == normalise(reference) for reference in references))


def right(answer: str, references: Sequence[str]) -> float:
    """1 if one of the references stands in the answer, as whole words in any letter case, else 0.

    Numbers are compared as they are written: `70` stands neither in `1,705` nor in `2.70`.
    """
    found = " ".join(answer.casefold().split())
    wanted = (" ".join(reference.casefold().split()) for reference in references)
    return float(any(_stands_in(one, found) for one in wanted if one))


def _stands_in(wanted: str, text: str) -> bool:
    whole = rf"(?<!\w)(?<!\d[.,]){re.escape(wanted)}(?!\w)(?![.,]\d)"
    return re.search(whole, text) is not None


def f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, best over the references."""
    return max(_overlap(normalise(answer), normalise(reference)) for reference in references)


def _overlap(answer: list[str], reference: list[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    if not common:
        return 0.0
    return 2 * common / (len(answer) + len(reference))


class _Words:
    """Words as ROUGE's own tokenizer has them, and those with other letters than a to z whole."""

    def __init__(self) -> None:
        self._own = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """The words, those of ASCII stemmed."""
        words = _WORD.findall(text.lower())
        return [part for w in words for part in (self._own.tokenize(w) if w.isascii() else [w])]


_ROUGE = RougeScorer(["rougeL"], tokenizer=_Words())


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure, best over the references."""
    return float(max(_ROUGE.score(r, answer)["rougeL"].fmeasure for r in references))
