"""Ingestion on paper: hours, bytes and dollars of so many chunks, from constants that are measured.

Arithmetic only, but for `measured`, which takes the two constants that depend on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.timing import bench_ingest
from docs.experiments.lengths import footprint
from docs.experiments.popularity import earning

_HOUR_S = 3600
_GB = 1e9
# Bytes of a token's text, which is there twice as it has an index; of a float32; and of a row's
# rest: checksum, metadata, and what it leaves empty of its page (measured: docs/scale.md).
_TEXT_BYTES, _FLOAT_BYTES, _ROW_BYTES = 8, 4, 2000


@dataclass(frozen=True)
class Constants:
    """What the arithmetic starts from. Prices are in dollars.

    Attributes:
        tokens_per_s: prefill by one worker.
        token_bytes: bytes of a token's KV, as it is kept.
        chunk_tokens: tokens of a chunk.
        workers: how many prefill.
        worker_hour: price of a worker for an hour.
        memory, disk, objects: price of a GB for a month in memory, on disk, in an object store.
        read_gb_s: GB a second at which kept KV is read back.
        vector_floats: length of a chunk's vector.

    Raises:
        ConfigError: one is not positive.
    """

    tokens_per_s: float
    token_bytes: float
    chunk_tokens: int = 256
    workers: int = 16
    worker_hour: float = 0.1
    memory: float = 3.0
    disk: float = 0.08
    objects: float = 0.023
    read_gb_s: float = 1.0
    vector_floats: int = 384

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value}")

    @property
    def tiers(self) -> dict[str, float]:
        """Price of a GB for a month, by tier."""
        return {"memory": self.memory, "disk": self.disk, "objects": self.objects}


@dataclass(frozen=True)
class ScaleRow:
    """So many chunks, prefilled once and kept for a month.

    Attributes:
        hours: until all are prefilled, by all workers.
        dollars: for these hours.
        kv_gb: of their KV.
        memory, disk, objects: dollars a month for that in each tier.
        index_gb: of their texts and vectors.
    """

    chunks: int
    hours: float
    dollars: float
    kv_gb: float
    memory: float
    disk: float
    objects: float
    index_gb: float


@dataclass(frozen=True)
class PlaceRow:
    """The chunks that are used often enough to cost less when kept than when prefilled each time.

    Attributes:
        uses_needed: uses a month from which on a chunk is one of them.
        earning: how many chunks that are; `kv_gb` are their GB.
        hits: share of all uses that are uses of them.
    """

    chunks: int
    tier: str
    uses_needed: float
    earning: int
    kv_gb: float
    hits: float


def scale_row(chunks: int, known: Constants) -> ScaleRow:
    """The arithmetic for one number of chunks."""
    tokens = chunks * known.chunk_tokens
    hours = tokens / known.tokens_per_s / _HOUR_S  # of one worker
    kv_gb = tokens * known.token_bytes / _GB
    row = known.chunk_tokens * _TEXT_BYTES + known.vector_floats * _FLOAT_BYTES + _ROW_BYTES
    return ScaleRow(
        chunks=chunks,
        hours=hours / known.workers,
        dollars=hours * known.worker_hour,
        kv_gb=kv_gb,
        memory=kv_gb * known.memory,
        disk=kv_gb * known.disk,
        objects=kv_gb * known.objects,
        index_gb=chunks * row / _GB,
    )


def uses_needed(known: Constants, price: float) -> float:
    """Uses a month from which on KV is cheaper to keep than to prefill; chunks' length cancels.

    Args:
        price: dollars for a GB for a month.
    """
    keeping = known.token_bytes / _GB * price
    prefilling = known.worker_hour / _HOUR_S / known.tokens_per_s
    return keeping / prefilling


def places(
    chunks: Sequence[int], uses: float, known: Constants, exponent: float = 1.0
) -> list[PlaceRow]:
    """Which chunks earn a place in each tier.

    Args:
        uses: chunks that are used in a month: answers times the chunks of each.
        exponent: of Zipf's law, see `popularity.py`.
    """
    rows = []
    for count in chunks:
        for tier, price in known.tiers.items():
            needed = uses_needed(known, price)
            own, hits = earning(count, uses, needed, exponent)
            kv_gb = own * known.chunk_tokens * known.token_bytes / _GB
            rows.append(PlaceRow(count, tier, needed, own, kv_gb, hits))
    return rows


def answer_seconds(known: Constants, chunks: int) -> tuple[float, float]:
    """Seconds that a worker prefills so many chunks, and seconds that it reads their KV."""
    tokens = chunks * known.chunk_tokens
    return tokens / known.tokens_per_s, tokens * known.token_bytes / (known.read_gb_s * _GB)


def measured(engine: Engine, chunk_tokens: int) -> tuple[float, float]:
    """Tokens a second of ingestion on this machine, and bytes of a token's KV on disk.

    Raises:
        ConfigError: the engine keeps nothing on disk.
    """
    rate = bench_ingest(engine, module_tokens=chunk_tokens).tokens_per_s
    weighed = footprint(engine)
    if weighed.disk is None:
        raise ConfigError("KV on disk is weighed, so the engine needs a StoreConfig with a path")
    return rate, weighed.disk
