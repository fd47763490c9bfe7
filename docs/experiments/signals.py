"""What tells, before an answer is given, that reuse will cost it.

If something told, a prompt could be repaired further where it must, and only there. A signal is
known without full prefill; what a question lost is not. Knows no methods but `reuse` and `auto`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.encodings import EncodedEngines
from cached_rag.evaluation.measure import Measurement, figures, read
from cached_rag.evaluation.metrics import bootstrap
from cached_rag.evaluation.prompts import messages
from cached_rag.evaluation.trial import DEFAULT_ENCODING

_ANSWER_TOKENS = 16
_FEWEST = 4  # so that a quarter of the questions is one
STRONG, OTHERS = "the strongest quarter", "the others"


@dataclass(frozen=True)
class SignalRow:
    """What `auto` cost where a signal is strong, or where it is not; means over questions.

    Attributes:
        signal: what is known before the answer (see `_signals`).
        questions: `STRONG` or `OTHERS`.
        n: how many.
        kl_along: divergence from full prefill over all tokens of the reference answer, in nats.
        nll_diff, nll_low, nll_high: negative log likelihood of the reference a token, less full
            prefill's, with its 95 % interval.
        f1_diff, f1_low, f1_high: the same of F1.
    """

    signal: str
    questions: str
    n: int
    kl_along: float
    nll_diff: float
    nll_low: float
    nll_high: float
    f1_diff: float
    f1_low: float
    f1_high: float


def bench_signals(
    engine: Engine,
    examples: Sequence[Example],
    progress: Callable[[], object] = lambda: None,
) -> list[SignalRow]:
    """Compare what `auto` cost the questions with the strongest signals with what it cost others.

    Args:
        engine: its model is used, its store is not.

    Raises:
        ConfigError: fewer than four questions have an answer.
    """
    asked = [example for example in examples if example.reference]
    if len(asked) < _FEWEST:
        raise ConfigError(f"signals need {_FEWEST} questions with an answer, not {len(asked)}")
    encodings = EncodedEngines(engine.model, examples, long=False)
    signals, costs = [], []
    for example in asked:
        own = encodings.engine(DEFAULT_ENCODING, example.chunks)
        auto = _read(own, example, "fast")
        costs.append(_cost(auto, _read(encodings.engine("", ()), example, "full"), example))
        stale = _first(own, example, example.chunks)
        experts = [_first(own, example, [chunk]) for chunk in example.chunks]
        signals.append(_signals(auto.log_probs, stale, torch.stack(experts)))
        progress()
    return [row for name in signals[0] for row in _rows(name, [s[name] for s in signals], costs)]


def _read(engine: Engine, example: Example, method: str) -> Measurement:
    config = GenerationConfig(method=method, max_tokens=_ANSWER_TOKENS)
    prompt = messages(example.chunks, example.question, long=False)
    return read(engine, prompt, config, example.reference)


def _first(engine: Engine, example: Example, chunks: Sequence[str]) -> torch.Tensor:
    """(vocab_size,) log probabilities of the first token, over these chunks' stale KV."""
    prompt = messages(chunks, example.question, long=False)
    prefill = engine.prefill(prompt, GenerationConfig(method="reuse", max_tokens=1))
    try:
        return prefill.logits[0].float().log_softmax(-1)
    finally:
        prefill.release()


def _cost(auto: Measurement, full: Measurement, example: Example) -> tuple[float, float, float]:
    """KL along the reference, NLL and F1 of `auto`, the last two less full prefill's."""
    found, before = (figures(reading, full, example.answers) for reading in (auto, full))
    (nll, plain_nll), (f1, plain_f1) = (
        (found[name] or 0.0, before[name] or 0.0) for name in ("nll", "f1")
    )
    return found["kl_along"] or 0.0, nll - plain_nll, f1 - plain_f1


def _signals(auto: torch.Tensor, stale: torch.Tensor, experts: torch.Tensor) -> dict[str, float]:
    """All signals of a question, in nats.

    Args:
        auto, stale: (vocab_size,) log probabilities of the first token, repaired and not.
        experts: (num_chunks, vocab_size) those over one chunk each: the experts of PCED (parallel
            context-of-experts decoding, Corallo and Papotti, 2026, arxiv.org/abs/2601.08670).
    """
    unsure = _entropy(experts)
    mixed = experts.logsumexp(0) - torch.tensor(len(experts)).log()
    return {
        "entropy": float(_entropy(auto)),
        "moved by the repair": _divergence(auto, stale),
        "experts disagree": float(_entropy(mixed) - unsure.mean()),
        "the surest expert disagrees": _divergence(experts[unsure.argmin()], auto),
    }


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """(...,) nats, of (..., vocab_size)."""
    return -(log_probs.exp() * log_probs).sum(-1)


def _divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() * (one - other)).sum())


def _rows(
    name: str, signal: Sequence[float], costs: Sequence[tuple[float, float, float]]
) -> Iterator[SignalRow]:
    order = sorted(range(len(signal)), key=lambda at: signal[at], reverse=True)
    quarter = len(order) // 4
    for questions, some in ((STRONG, order[:quarter]), (OTHERS, order[quarter:])):
        along, nll, f1 = zip(*(costs[at] for at in some), strict=True)
        likely, right = bootstrap(nll), bootstrap(f1)
        yield SignalRow(
            *(name, questions, len(some), statistics.fmean(along)),
            *(likely.mean, likely.low, likely.high),
            *(right.mean, right.low, right.high),
        )
