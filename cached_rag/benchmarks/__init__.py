"""Timings as library code behind the command line. Ratios within one run, medians, interleaved."""

from cached_rag.benchmarks.ingest import IngestRow, bench_ingest
from cached_rag.benchmarks.loading import LoadingRow, bench_loading
from cached_rag.benchmarks.machine import machine
from cached_rag.benchmarks.schemas import (
    Footprint,
    LengthRow,
    PromptRow,
    bench_lengths,
    bench_prompt,
    footprint,
    plot_lengths,
)
from cached_rag.benchmarks.ttft import TtftRow, bench_ttft

__all__ = [
    "Footprint",
    "IngestRow",
    "LengthRow",
    "LoadingRow",
    "PromptRow",
    "TtftRow",
    "bench_ingest",
    "bench_lengths",
    "bench_loading",
    "bench_prompt",
    "bench_ttft",
    "footprint",
    "machine",
    "plot_lengths",
]
