"""What weights in few bits cost and gain: answers' likelihood, time of a decoding step, memory.

The same tokens are decoded with few-bit weights and with dense ones, a few at a time, so that the
kernels of decoding compute them. Knows the transformers backend, whose weights these are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers.loading import load_model
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.errors import ConfigError
from cached_rag.evaluation.summary import Interval, bootstrap
from cached_rag.evaluation.timing import medians, milliseconds
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import stacks_of
from cached_rag.kv.rows import RowKV

# Tokens of a text that are prefilled, and those behind them that are decoded and scored.
_GIVEN, _SCORED = 128, 96
# Tokens of a step: few enough for every few-bit kernel.
_AT_ONCE = 6
# The context behind which steps are timed.
_CONTEXT = 512


@dataclass(frozen=True)
class WeightsRow:
    """One format, compared with dense weights in the same run.

    Attributes:
        weights_bytes: of all weights, dense ones included.
        step_ms, dense_ms: median time of one token with these weights and with dense ones.
        kl: mean KL divergence from dense weights' next-token probabilities, in nats.
        nll: mean difference of the true tokens' negative log-likelihood, in nats a token, with an
            interval over texts.
        agreement: share of positions with the same likeliest token.
    """

    weights: str
    weights_bytes: int
    step_ms: float
    dense_ms: float
    kl: float
    nll: Interval
    agreement: float


def bench_weights(
    name: str,
    formats: Sequence[str],
    texts: Sequence[str],
    *,
    dtype: str | None = None,
    repeats: int = 20,
    on_text: Callable[[], object] = lambda: None,
) -> Iterator[WeightsRow]:
    """Compare formats of a model's weights with dense weights, one after another.

    Args:
        texts: long ones; shorter ones are left out.
        on_text: called after each text; for a progress bar.

    Raises:
        ConfigError: no text is long enough.
    """
    dense = load_model(name, dtype, "cpu", "bf16")
    tokenised = (dense.tokenizer(text).input_ids[: _GIVEN + _SCORED] for text in texts)
    long = [torch.tensor([ids]) for ids in tokenised if len(ids) == _GIVEN + _SCORED]
    if not long:
        raise ConfigError(f"no text has {_GIVEN + _SCORED} tokens; give longer texts with --data")
    for weights in formats:
        model = load_model(name, dtype, "cpu", weights)
        found = []
        for ids in long:
            found.append(_compared(_scored(dense, ids), _scored(model, ids), ids[0, _GIVEN:]))
            on_text()
        kl, nll, same = zip(*found, strict=True)
        times = _timed({"few": model, "dense": dense}, repeats)
        yield WeightsRow(
            weights,
            model.weights_bytes,
            times["few"]["ms"],
            times["dense"]["ms"],
            statistics.mean(kl),
            bootstrap(nll),
            statistics.mean(same),
        )


@torch.inference_mode()
def _scored(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """(_SCORED, vocab_size) log-probabilities of the tokens behind the given ones."""
    row = RowKV(KVBuffer.like(model.shapes, ids.shape[1]), _GIVEN)
    logits = [model.prefill(row.own, ids[:, :_GIVEN]).logits]
    for begin in range(_GIVEN, ids.shape[1] - 1, _AT_ONCE):
        new = ids[0, begin : min(begin + _AT_ONCE, ids.shape[1] - 1)].tolist()
        logits.append(model.step([StepInput(row, new, num_logits=len(new))]))
    return torch.cat(logits).float().log_softmax(-1)


def _compared(
    dense: torch.Tensor, few: torch.Tensor, truth: torch.Tensor
) -> tuple[float, float, float]:
    """Mean KL divergence, mean difference in likelihood, share of the same likeliest token."""
    kl = (dense.exp() * (dense - few)).sum(-1).mean()
    nll = (dense - few).gather(1, truth[:, None]).mean()
    return float(kl), float(nll), float((dense.argmax(-1) == few.argmax(-1)).float().mean())


def _timed(models: dict[str, LanguageModel], repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step of one token behind `_CONTEXT` others, in turns."""

    def prepared(model: LanguageModel) -> RowKV:
        row = RowKV(KVBuffer.like(model.shapes, _CONTEXT + 1), _CONTEXT)
        stacks_of(row.own.keys)[0].normal_()
        stacks_of(row.own.values)[0].normal_()
        return row

    def step(model: LanguageModel, row: RowKV) -> dict[str, float]:
        row.length = _CONTEXT
        return {"ms": milliseconds(lambda: model.step([StepInput(row, [1])]), model.shapes.device)}

    calls = {name: partial(step, model, prepared(model)) for name, model in models.items()}
    return medians(calls, repeats, warm_up=3)
