"""CacheBlend as its authors' released scripts run it, faults included, to put a price on them.

Three of the four scripts compute only the prompt's last token for certain: the question's KV comes,
like a module's, from a pass of its own and is repaired only where its values deviate most. And the
rows' mask is aligned to the bottom right: m scattered rows see what the last m rows would. Nothing
else in the library does either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.tokenizer import Message, Tokens
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.loading import LanguageModel
from cached_rag.backends.transformers.prefill import prefill_selected
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.evaluation.measure import Reading, read_on
from cached_rag.kv.buffer import KVBuffer
from cached_rag.library.encode import encode_chunks, encode_prefix
from cached_rag.library.plan import Placement
from cached_rag.methods import CacheBlend, Layout


class BottomRightRows(Rows):
    """Rows that see as if they were the prompt's last ones."""

    def visible(self) -> torch.Tensor:
        """(num_rows,) the last slot that each row sees; only the last row should see that far."""
        first = self.length - len(self.slots)
        return torch.arange(first, self.length, device=self.slots.device)


@dataclass(frozen=True)
class Released:
    """A prompt prefilled in that way; see `Prefilled`."""

    tokens: Tokens
    logits: torch.Tensor
    buffer: KVBuffer
    report: Report

    def release(self) -> None:
        """The buffer is nobody else's."""


def read_released(
    engine: Engine,
    prompt: Sequence[Message],
    ratio: float,
    max_tokens: int,
    reference: str | None,
    generates: bool,
) -> Reading:
    """What CacheBlend makes of a prompt in that way; modules as the engine has them encoded."""
    tokens, plan = engine.plan(prompt, "cacheblend", Report("cacheblend"))
    live = plan.layout(engine.model.shapes.num_layers).fresh
    places = [*plan.placements, *_stale(engine, tokens, live)]
    config = GenerationConfig(method="full", max_tokens=max_tokens)

    def prefill() -> Released:
        return _prefill(engine, tokens, places, CacheBlend(ratio), max_tokens)

    return read_on(engine, prefill, config, reference, generates=generates)


def _stale(engine: Engine, tokens: Tokens, live: torch.Tensor) -> list[Placement]:
    """KV of the runs between and behind modules, each from a pass of its own."""
    sink = engine.tokenization.sink_ids
    head = encode_prefix(engine.model, sink) if sink else None
    wanted = live.clone()
    wanted[-1] = False
    begins = (wanted & ~torch.cat([wanted.new_zeros(1), wanted[:-1]])).nonzero().flatten().tolist()
    places = []
    for begin in begins:
        end = begin
        while wanted[end]:
            end += 1
        (kv,) = encode_chunks(engine.model, head, [tuple(tokens.ids[begin:end])])
        places.append(Placement(begin, kv, is_exact=False))
    return places


def _prefill(
    engine: Engine, tokens: Tokens, places: list[Placement], selector: CacheBlend, max_tokens: int
) -> Released:
    model, length = engine.model, len(tokens)
    if not isinstance(model, LanguageModel):
        raise ConfigError("cacheblend-released runs on transformers models only")
    buffer = KVBuffer.like(model.shapes, length + max_tokens)
    for place in places:
        buffer.place(place.kv, place.begin, model.rule)
    exact = torch.zeros(length, dtype=torch.bool)
    for place in places:
        exact[place.begin : place.end] = place.is_exact
    live = torch.arange(length) == length - 1
    spans = tuple((place.begin, place.end) for place in places if not place.is_exact)
    layout = Layout(live, exact, spans, model.shapes.num_layers)
    ids = torch.tensor([tokens.ids], device=model.device)
    done = prefill_selected(model.decoder, buffer, ids, layout, selector, BottomRightRows)
    report = Report("cacheblend-released", length)
    report.charged_recompute = done.computed / (length * model.shapes.num_layers)
    return Released(tokens, done.logits, buffer, report)
