"""Ingestion against the model's own batched prefill: tokens a second, in one run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from cached_rag.engine.engine import Engine
from cached_rag.library.encode import BATCH_TOKENS, encode_modules
from cached_rag.library.library import Behind


@dataclass(frozen=True)
class IngestRow:
    """Encoding with its store, and transformers' forward pass over the same batches.

    Attributes:
        ratio: of `tokens_per_s` to `plain_tokens_per_s`.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float


def bench_ingest(
    engine: Engine, *, modules: int = 8, module_tokens: int = 512, repeats: int = 3
) -> IngestRow:
    """Time both in turn; medians. Batches are the encoder's own."""
    generator = torch.Generator().manual_seed(0)
    size = engine.model.vocab_size
    ids = torch.randint(0, size, (modules, module_tokens), generator=generator)
    rows = [tuple(row) for row in ids.tolist()]
    batch = max(1, BATCH_TOKENS // module_tokens)
    own, plain = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for kv in encode_modules(engine.model, None, rows):
            engine.library.put(Behind((0,)), kv)
        own.append(time.perf_counter() - began)
        began = time.perf_counter()
        for part in torch.split(ids, batch):
            engine.model.forward(part)
        plain.append(time.perf_counter() - began)
    tokens = modules * module_tokens
    rates = [tokens / statistics.median(times[1:]) for times in (own, plain)]
    return IngestRow(round(rates[0], 1), round(rates[1], 1), round(rates[0] / rates[1], 3))
