"""Tokens per second of ingestion, against the model's own batched prefill in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cached_rag.engine.engine import Engine
from cached_rag.evaluation.loop import medians, milliseconds
from cached_rag.library.encode import BATCH_TOKENS, encode_chunks
from cached_rag.library.matching import EncodedAfter


@dataclass(frozen=True)
class IngestRow:
    """Encoding chunks into the store, and the model's own forward pass over the same batches.

    Attributes:
        ratio: `tokens_per_s` over `plain_tokens_per_s`.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float


def bench_ingest(
    engine: Engine, *, modules: int = 8, module_tokens: int = 512, repeats: int = 3
) -> IngestRow:
    """Time both in turn on random tokens, in batches of the encoder's size."""
    generator = torch.Generator().manual_seed(0)
    size = (modules, module_tokens)
    ids = torch.randint(0, engine.model.vocab_size, size, generator=generator)
    batches = torch.split(ids, max(1, BATCH_TOKENS // module_tokens))

    def encode() -> None:
        for kv in encode_chunks(engine.model, None, [tuple(row) for row in ids.tolist()]):
            engine.library.put(EncodedAfter((0,)), kv)

    def forward() -> None:
        for batch in batches:
            engine.model.forward(batch)

    def rate(work: Callable[[], None]) -> dict[str, float]:
        spent = milliseconds(work, engine.model.shapes.device)
        return {"tokens_per_s": 1000 * ids.numel() / spent}

    found = medians({"own": lambda: rate(encode), "plain": lambda: rate(forward)}, repeats)
    own, plain = (figures["tokens_per_s"] for figures in found.values())
    return IngestRow(own, plain, own / plain)
