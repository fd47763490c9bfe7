"""What becomes of an answer where some of the KV is what full prefill computes, and the rest stale.

Here nothing is recomputed: the exact KV is taken from a full prefill of the same prompt. So this
shows what a choice of tokens, or layers, could give at best, without the error of recomputing them
among stale ones. Knows transformers models only, as it chooses by the question's attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from cached_rag.backends.base import Prefilled
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.backends.transformers.prefill import choose_rows
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.encodings import EncodedEngines
from cached_rag.evaluation.metrics import bootstrap
from cached_rag.evaluation.prompts import messages
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods import AnchorFlow, Epic, InfoFlow
from cached_rag.methods.question import top_rows
from docs.experiments.probes import (
    OneLayer,
    Watching,
    WholeChunks,
    deep_norms,
    over_anchors,
)

SHARES = (0.05, 0.15, 0.4)
_ANSWER_TOKENS = 16
_DRAFT_TOKENS = 2  # 4, 8 and 16 gave the same
# (num_layers, seq_len) bool: which tokens' keys, and which values, are exact in which layer.
_Mix = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MixRow:
    """One mixture; means over the questions.

    Attributes:
        exact: what is exact: tokens, layers, or one side.
        share: of the chunks' (token, layer) pairs; keys alone, or values, count half.
        kl: divergence of the first token from full prefill's, in nats.
        kl_along: the same over all tokens of the reference answer.
        entropy: of the first token, nats.
        attention: how far the question's attention to the chunks' tokens is from full prefill's, as
            a share of its length; mean over the late layers (CacheBlend, section 4.3 and Fig. 6,
            https://arxiv.org/abs/2405.16444: attention deviation).
        nll_diff, low, high: negative log likelihood of the reference a token, less full prefill's,
            with its 95 % interval.
    """

    exact: str
    n: int
    share: float
    kl: float
    kl_along: float
    entropy: float
    attention: float
    nll_diff: float
    low: float
    high: float


@dataclass(frozen=True)
class _Found:
    share: float
    kl: float
    kl_along: float
    entropy: float
    attention: float
    nll_diff: float


def bench_mixing(
    engine: Engine,
    examples: Sequence[Example],
    encoding: str = "primer",
    progress: Callable[[], object] = lambda: None,
) -> list[MixRow]:
    """Mix exact and stale KV of each question's chunks in all ways.

    Args:
        engine: its model is used, its store is not.
        encoding: as in `Trial.encoding`.

    Raises:
        ConfigError: no transformers model, or no question with an answer.
    """
    model = engine.model
    if not isinstance(model, LanguageModel):
        raise ConfigError("mixtures are made on transformers models only")
    asked = [example for example in examples if example.reference]
    if not asked:
        raise ConfigError("no question of this set has an answer, so there is no likelihood")
    encodings = EncodedEngines(model, examples, long=False)
    found: dict[str, list[_Found]] = {}
    for example in asked:
        mixed = _Mixed(model, encodings.engine(encoding, example.chunks), example)
        for name, mix in mixed.mixtures():
            found.setdefault(name, []).append(mixed.measure(mix))
        progress()
    return [_row(name, rows) for name, rows in found.items()]


class _Mixed:
    """One question, with its KV computed in full, and its KV as reuse has it."""

    def __init__(self, model: LanguageModel, engine: Engine, example: Example) -> None:
        self._model = model
        reference = example.reference or ""
        answer = engine.tokenization.literal(reference.strip()).ids[:_ANSWER_TOKENS]
        prompt = messages(example.chunks, example.question, long=False)
        stale = engine.prefill(prompt, GenerationConfig(method="reuse", max_tokens=_ANSWER_TOKENS))
        assert stale.buffer is not None
        assert stale.plan is not None
        try:
            self.prompt = list(stale.tokens.ids)
            self.layout = stale.plan.layout(model.shapes.num_layers)
            self._stale = stale.buffer.read(0, len(self.prompt), tuple(self.prompt))
        finally:
            stale.release()
        self._ids = torch.tensor([[*self.prompt, *answer[:-1]]])
        self._wanted = torch.tensor(answer)[:, None]
        with torch.inference_mode():
            self._full = KVBuffer.like(model.shapes, self._ids.shape[1])
            with deep_norms(model.decoder) as self._norms:
                done = model.prefill(self._full, self._ids, num_logits=len(answer))
            self._target = self._logs(done)
        every = self.layout.reused.expand(self.layout.num_layers, -1)
        self._attended = self._attention(self._mixture((every, every)))

    def mixtures(self) -> Iterator[tuple[str, _Mix]]:
        """All of them, by what is exact."""
        layout, layers = self.layout, self.layout.num_layers
        reused, count = layout.reused, len(self.prompt)
        none = torch.zeros(layers, count, dtype=torch.bool)
        every = reused.expand(layers, count)
        yield "nothing", (none, none)
        yield "keys", (every, none)
        yield "values", (none, every)
        for name, part in (
            ("first half of the layers", slice(0, layers // 2)),
            ("second half of the layers", slice(layers // 2, layers)),
        ):
            some = none.clone()
            some[part] = reused
            yield name, (some, some)
        for name, tokens in self._choices():
            some = (tokens & reused).expand(layers, count)
            yield name, (some, some)
        yield "all", (every, every)

    def _choices(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "first 8 tokens of each chunk", Epic(8).first_rows(self.layout)
        order = torch.rand(len(self.prompt), generator=torch.Generator().manual_seed(0))
        answer, draft = self._ids[0, len(self.prompt) :], self._draft(_DRAFT_TOKENS)
        anchors = over_anchors(self.layout)
        for share in SHARES:
            said = f"{100 * share:.0f} %"
            windows = AnchorFlow(share, anchor_tokens=0, window=16)
            yield f"{said}, by the question", self._chosen(InfoFlow(share))
            yield f"{said}, by the question, in windows of 16", self._chosen(windows)
            over = self._chosen(InfoFlow(share), rows_type=anchors)
            yield f"{said}, by the question over anchors", over
            over = self._chosen(OneLayer(share), rows_type=anchors)
            yield f"{said}, by the question over anchors, in one layer", over
            yield f"{said}, by question and answer", self._chosen(InfoFlow(share), answer)
            yield f"{said}, by question and draft", self._chosen(InfoFlow(share), draft)
            yield f"{said}, by the values' deviation in layer 1", self._farthest(share, 1)
            yield f"{said}, by the values' deviation in the last layer", self._farthest(share, -1)
            norms = self._norms[0][: len(self.prompt)]
            yield f"{said}, by the norm of deep hidden states", self._highest(norms, share)
            yield f"{said}, by chance", order < share
        for count in (1, 2):
            yield f"{count} whole, by the question", self._chosen(WholeChunks(count=count))

    def _chosen(
        self,
        selector: InfoFlow,
        told: torch.Tensor | None = None,
        rows_type: type[Rows] = Rows,
    ) -> torch.Tensor:
        """(num_tokens,) bool: what question, and tokens told after it, choose over stale KV."""
        count, layout = len(self.prompt), self.layout
        ids = self._ids[:, :count]
        if told is not None:
            ids, more = torch.cat([ids, told[None]], 1), torch.ones(len(told), dtype=torch.bool)
            fresh, exact = torch.cat([layout.fresh, more]), torch.cat([layout.exact, ~more])
            layout = replace(layout, fresh=fresh, exact=exact)
        chosen = choose_rows(
            self._model.decoder, self._buffer(), ids, layout, selector, rows_type=rows_type
        )
        assert chosen is not None
        tokens = torch.zeros(ids.shape[1], dtype=torch.bool)
        tokens[chosen.rows.cpu()] = True
        return tokens[:count]

    def _farthest(self, share: float, layer: int) -> torch.Tensor:
        """(num_tokens,) bool: the reused tokens whose values differ most from full prefill's."""
        full = self._full.values[layer][..., : len(self.prompt), :]
        apart = (self._buffer().values[layer][..., : len(self.prompt), :] - full).float()
        return self._highest(apart.square().sum((0, 1, -1)), share)

    def _highest(self, scores: torch.Tensor, share: float) -> torch.Tensor:
        """(num_tokens,) bool: the reused tokens of the highest of (num_tokens,) scores."""
        reused = self.layout.reused
        return top_rows(scores, reused.to(scores.device), round(share * int(reused.sum()))).cpu()

    def _attention(self, buffer: KVBuffer) -> torch.Tensor:
        """(num_late_layers, num_reused): what the question attends to over a buffer's KV."""
        watching, ids = Watching(0.5), self._ids[:, : len(self.prompt)]
        choose_rows(self._model.decoder, buffer, ids, self.layout, watching)
        (seen,) = watching.seen
        return seen[:, self.layout.reused.to(seen.device)].float()

    def _draft(self, count: int) -> torch.Tensor:
        """(count,): the answer's first tokens, greedily, over stale KV."""
        ids, slots = self._ids[:, : len(self.prompt)], self.layout.fresh.nonzero()[:, 0]
        buffer = self._buffer()
        with torch.inference_mode():
            for _ in range(count):
                done = self._model.prefill(buffer, ids, slots, num_logits=1)
                ids = torch.cat([ids, done.tail[0, -1:].argmax(-1)[None]], 1)
                slots = torch.tensor([ids.shape[1] - 1])
        return ids[0, -count:]

    def measure(self, mix: _Mix) -> _Found:
        """The answer's likelihood over a mixture; the question is computed over it."""
        with torch.inference_mode():
            buffer = self._mixture(mix)
            attended = self._attention(buffer) - self._attended
            behind = torch.arange(len(self.prompt), self._ids.shape[1])
            slots = torch.cat([self.layout.fresh.nonzero()[:, 0], behind])
            done = self._model.prefill(buffer, self._ids, slots, num_logits=len(self._wanted))
        logs = self._logs(done)
        apart = (self._target.exp() * (self._target - logs)).sum(-1)
        nll, wanted = (-float(one.gather(1, self._wanted).mean()) for one in (logs, self._target))
        whole = 2 * int(self.layout.reused.sum()) * self.layout.num_layers
        return _Found(
            share=float(sum(side.sum() for side in mix)) / max(1, whole),
            kl=float(apart[0]),
            kl_along=float(apart.mean()),
            entropy=-float((logs[0].exp() * logs[0]).sum()),
            attention=float((attended.norm(dim=1) / self._attended.norm(dim=1)).mean()),
            nll_diff=nll - wanted,
        )

    def _mixture(self, mix: _Mix) -> KVBuffer:
        """A buffer with the prompt's stale KV, and exact KV where the mixture has it."""
        buffer = self._buffer()
        for layer, (keys, values) in enumerate(zip(*mix, strict=True)):
            for mask, held, full in (
                (keys, buffer.keys[layer], self._full.keys[layer]),
                (values, buffer.values[layer], self._full.values[layer]),
            ):
                at = mask.nonzero()[:, 0]
                held[..., at, :] = full[..., at, :]
        return buffer

    def _buffer(self) -> KVBuffer:
        """A buffer with the prompt's stale KV, and room for an answer."""
        buffer = KVBuffer.like(self._model.shapes, len(self.prompt) + _ANSWER_TOKENS)
        buffer.place(self._stale, 0, self._model.rule)
        return buffer

    def _logs(self, done: Prefilled) -> torch.Tensor:
        return done.tail[0].float().log_softmax(-1)


def _row(name: str, rows: Sequence[_Found]) -> MixRow:
    means = {
        field.name: statistics.fmean(getattr(row, field.name) for row in rows)
        for field in fields(_Found)
    }
    interval = bootstrap([row.nll_diff for row in rows])
    return MixRow(exact=name, n=len(rows), **means, low=interval.low, high=interval.high)
