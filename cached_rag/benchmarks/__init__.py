"""Timings as library code behind the command line. Ratios within one run, medians, interleaved."""

from cached_rag.benchmarks.architectures import ArchitectureRow, bench_architectures
from cached_rag.benchmarks.attention import AttentionRow, bench_attention, plot_attention
from cached_rag.benchmarks.ingest import IngestRow, bench_ingest
from cached_rag.benchmarks.kernels import KernelRow, bench_kernels
from cached_rag.benchmarks.loading import LoadingRow, bench_loading
from cached_rag.benchmarks.machine import machine
from cached_rag.benchmarks.models import ModelRow, bench_model, bench_models, to_markdown
from cached_rag.benchmarks.schemas import (
    Footprint,
    LengthRow,
    PromptRow,
    bench_lengths,
    bench_prompt,
    footprint,
    plot_lengths,
)
from cached_rag.benchmarks.serving import ArrivalRow, ServingRow, bench_arrivals, bench_serving
from cached_rag.benchmarks.traffic import TrafficRow, bench_traffic
from cached_rag.benchmarks.ttft import TtftRow, bench_ttft

__all__ = [
    "ArrivalRow",
    "ArchitectureRow",
    "AttentionRow",
    "Footprint",
    "IngestRow",
    "KernelRow",
    "LengthRow",
    "LoadingRow",
    "ModelRow",
    "PromptRow",
    "ServingRow",
    "TrafficRow",
    "TtftRow",
    "bench_architectures",
    "bench_arrivals",
    "bench_attention",
    "bench_ingest",
    "bench_kernels",
    "bench_lengths",
    "bench_loading",
    "bench_model",
    "bench_models",
    "bench_prompt",
    "bench_serving",
    "bench_traffic",
    "bench_ttft",
    "footprint",
    "machine",
    "plot_attention",
    "plot_lengths",
    "to_markdown",
]
