"""CacheBlend as its authors' released scripts compute it, with two errors, to measure their cost.

First, three of the four scripts always compute only the prompt's last token. The question's KV
comes, like a chunk's, from a pass of its own, and only its tokens that deviate most are recomputed.
Second, the mask of the recomputed rows is aligned to the bottom right: m scattered rows see what
the last m rows of the prompt should see. The library itself does neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.backends.prompt_text import Message, Tokens
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.model import LanguageModel
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
    """Rows with the wrong mask: each sees what one of the prompt's last rows should see."""

    def visible(self) -> torch.Tensor:
        """(num_rows,) the last slot that each row sees, too far for all rows but the last."""
        first = self.length - len(self.slots)
        return torch.arange(first, self.length, device=self.slots.device)


@dataclass(frozen=True)
class Released:
    """A prompt prefilled by the released scripts' way; see `engine.decoding.Prefilled`."""

    tokens: Tokens
    logits: torch.Tensor
    buffer: KVBuffer
    report: Report

    def follow(self, token_ids: Sequence[int]) -> None:
        """No repair goes on with the answer."""

    def release(self) -> None:
        """Nothing to do: no other request uses the buffer."""


def read_released(
    engine: Engine,
    prompt: Sequence[Message],
    ratio: float,
    max_tokens: int,
    reference: str | None,
    generates: bool,
) -> Reading:
    """Measure a prompt with the released scripts' CacheBlend, over the engine's encoded chunks."""
    tokens, plan = engine.plan(prompt, "cacheblend", Report("cacheblend"))
    live = plan.layout(engine.model.shapes.num_layers).fresh
    places = [*plan.placements, *_stale(engine, tokens, live)]
    config = GenerationConfig(method="full", max_tokens=max_tokens)

    def prefill() -> Released:
        return _prefill(engine, tokens, places, CacheBlend(ratio), max_tokens)

    return read_on(engine, prefill, config, reference, generates=generates)


def _stale(engine: Engine, tokens: Tokens, live: torch.Tensor) -> list[Placement]:
    """KV of the text between and after chunks, each run of it from a pass of its own."""
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
