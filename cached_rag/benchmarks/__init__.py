"""Benchmarks of speed, as ratios within one run: one file per benchmark, one loop for all (`loop`).

Most know a model only as a `Backend`. Four know transformers: `attention` and `kernels` time the
attention of its backend, `architectures` and `models` make the tables of docs/models.md.
"""

from cached_rag.benchmarks.answers import bench_answers, make_questions
from cached_rag.benchmarks.architectures import bench_architectures
from cached_rag.benchmarks.attention import bench_attention, plot_attention, query_heads
from cached_rag.benchmarks.chat import bench_chat
from cached_rag.benchmarks.ingest import bench_ingest
from cached_rag.benchmarks.kernels import bench_kernels
from cached_rag.benchmarks.loading import bench_loading
from cached_rag.benchmarks.machine import machine
from cached_rag.benchmarks.memory import Workload, bench_memory
from cached_rag.benchmarks.models import bench_models
from cached_rag.benchmarks.new_prompts import NEW_PROMPTS
from cached_rag.benchmarks.peers.base import Peer, Question, Sample
from cached_rag.benchmarks.peers.text import TextPeer
from cached_rag.benchmarks.peers.transformers import load_again
from cached_rag.benchmarks.peers.vllm import Vllm
from cached_rag.benchmarks.peers_plot import plot_peers
from cached_rag.benchmarks.popularity import (
    HitRow,
    earning,
    harmonic,
    hit_rates,
    lru_hits,
    zipf_trace,
)
from cached_rag.benchmarks.scale import (
    Constants,
    PlaceRow,
    ScaleRow,
    answer_seconds,
    measured,
    places,
    scale_row,
    uses_needed,
)
from cached_rag.benchmarks.scenarios import SCENARIOS, PeerRow, Scenarios, bench_scenario
from cached_rag.benchmarks.schemas import bench_lengths, bench_prompt, footprint, plot_lengths
from cached_rag.benchmarks.serving import bench_arrivals, bench_serving
from cached_rag.benchmarks.stored import StoredRow, bench_stored
from cached_rag.benchmarks.traffic import bench_traffic, drawn
from cached_rag.benchmarks.ttft import bench_ttft

__all__ = [
    "NEW_PROMPTS",
    "SCENARIOS",
    "Constants",
    "HitRow",
    "PeerRow",
    "PlaceRow",
    "ScaleRow",
    "Peer",
    "Question",
    "Sample",
    "StoredRow",
    "TextPeer",
    "Vllm",
    "Workload",
    "Scenarios",
    "answer_seconds",
    "bench_answers",
    "bench_architectures",
    "bench_arrivals",
    "bench_attention",
    "bench_chat",
    "bench_ingest",
    "bench_kernels",
    "bench_lengths",
    "bench_loading",
    "bench_memory",
    "bench_models",
    "bench_prompt",
    "bench_serving",
    "bench_stored",
    "bench_traffic",
    "bench_ttft",
    "bench_scenario",
    "drawn",
    "earning",
    "footprint",
    "harmonic",
    "hit_rates",
    "lru_hits",
    "load_again",
    "machine",
    "make_questions",
    "measured",
    "places",
    "plot_attention",
    "plot_lengths",
    "plot_peers",
    "query_heads",
    "scale_row",
    "uses_needed",
    "zipf_trace",
]
