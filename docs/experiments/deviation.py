"""How KV that was computed apart differs from full prefill's: CacheBlend's figures 6 to 8.

A token's KV deviation in a layer is the sum of the absolute differences of its keys and values
(section 4.1). The paper's selective recompute stands on two observations: few tokens have most of
it, and those that have it in one layer have it in the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from cached_rag.backends.prompt_text import Message
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.data import Example, messages
from cached_rag.kv.layers import stacks_of

# The share of tokens that the paper recomputes, and at which figure 7 is read.
_FEW = 0.15


@dataclass(frozen=True)
class LayerRow:
    """One layer, means over prompts.

    Attributes:
        of_the_few: share of all deviation that the 15 % of the tokens with most of it have.
        correlation: Spearman's, of the tokens' deviations here and in the next layer; None for the
            last.
    """

    layer: int
    of_the_few: float
    correlation: float | None


@dataclass(frozen=True)
class RatioRow:
    """One method, means over prompts.

    Attributes:
        charged: (token, layer) pairs that were computed, as a share of all.
        deviation: what is left of the deviation without repair, as a share.
        kl: divergence of the first token from full prefill's, in nats.
    """

    method: str
    charged: float
    deviation: float
    kl: float


def measure_deviation(
    engine: Engine, examples: Sequence[Example], methods: Sequence[str]
) -> tuple[list[LayerRow], list[RatioRow]]:
    """Compare KV of questions' prompts with full prefill's, layer by layer and method by method.

    Args:
        engine: keeps nothing of prompts; the chunks are encoded here, each by itself as in the
            paper.

    Raises:
        ConfigError: the model's layers keep KV of several sizes, which do not add up.
    """
    if len(engine.model.shapes.kinds) > 1:
        raise ConfigError("the model's layers differ in what they keep; take one whose do not")
    engine.encode([chunk for one in examples for chunk in one.chunks], context=None)
    shares: list[list[float]] = []
    ranks: list[list[float]] = []
    found: dict[str, list[tuple[float, float, float]]] = {method: [] for method in methods}
    for one in examples:
        prompt = messages(one.chunks, one.question, long=False)
        full, sure, _ = _computed(engine, prompt, "full")
        apart, _, _ = _computed(engine, prompt, "reuse")
        before = _deviation(apart, full)
        before = before[:, before[-1] > 0]  # the head's is the same
        shares.append(_of_the_few(before))
        ranks.append(_correlations(before))
        for method in methods:
            kv, logits, charged = _computed(engine, prompt, method)
            left = float(_deviation(kv, full).sum() / before.sum())
            kl = float((sure.exp() * (sure - logits)).sum())
            found[method].append((charged, left, kl))
    layers = [statistics.fmean(column) for column in zip(*shares, strict=True)]
    between = [statistics.fmean(column) for column in zip(*ranks, strict=True)]
    pairs = zip(layers, [*between, None], strict=True)
    means = {
        method: map(statistics.fmean, zip(*rows, strict=True)) for method, rows in found.items()
    }
    return (
        [LayerRow(layer, share, rank) for layer, (share, rank) in enumerate(pairs)],
        [RatioRow(method, *figures) for method, figures in means.items()],
    )


def _computed(
    engine: Engine, prompt: list[Message], method: str
) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Keys and values, (num_layers, heads, seq_len, dim) each; log probabilities; the charge."""
    done = engine.prefill(prompt, method=method)
    buffer = done.buffer
    assert buffer is not None
    count = len(done.tokens.ids)
    sides = (*stacks_of(buffer.keys), *stacks_of(buffer.values))
    kv = [side[:, 0, :, :count].float().clone() for side in sides]
    logits = torch.log_softmax(done.logits[0].float(), dim=-1)
    done.release()
    return kv, logits, done.report.charged_recompute


def _deviation(kv: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> torch.Tensor:
    """(num_layers, seq_len) of each token in each layer."""
    sides = zip(kv, full, strict=True)
    return torch.stack([(one - other).abs().sum((1, 3)) for one, other in sides]).sum(0)


def _of_the_few(deviation: torch.Tensor) -> list[float]:
    most = deviation.sort(dim=-1, descending=True).values
    few = most[:, : max(1, round(_FEW * most.shape[-1]))]
    return [float(share) for share in few.sum(-1) / most.sum(-1).clamp(min=1e-30)]


def _correlations(deviation: torch.Tensor) -> list[float]:
    ranks = deviation.argsort(dim=-1).argsort(dim=-1).double()
    return [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairwise(ranks)]
