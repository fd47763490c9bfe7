"""Timings as library code behind the command line. Ratios within one run, medians, interleaved."""

from cached_rag.benchmarks.ingest import IngestRow, bench_ingest
from cached_rag.benchmarks.loading import LoadingRow, bench_loading
from cached_rag.benchmarks.machine import machine
from cached_rag.benchmarks.ttft import TtftRow, bench_ttft

__all__ = [
    "IngestRow",
    "LoadingRow",
    "TtftRow",
    "bench_ingest",
    "bench_loading",
    "bench_ttft",
    "machine",
]
