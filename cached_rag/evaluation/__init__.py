"""Quality and speed of every method against full prefill, on question-answering data sets."""

from cached_rag.evaluation.comparison import ComparisonRow, compare, summarise_comparison
from cached_rag.evaluation.data import Example, load_examples
from cached_rag.evaluation.journal import Journal, origins
from cached_rag.evaluation.mixing import MixRow, bench_mixing
from cached_rag.evaluation.run import Settings, evaluate
from cached_rag.evaluation.signals import SignalRow, bench_signals
from cached_rag.evaluation.summary import summarise
from cached_rag.evaluation.trial import Trial, make_trials
from cached_rag.evaluation.weights import bench_weights

__all__ = [
    "ComparisonRow",
    "Example",
    "Journal",
    "MixRow",
    "Settings",
    "SignalRow",
    "Trial",
    "bench_mixing",
    "bench_signals",
    "bench_weights",
    "compare",
    "evaluate",
    "load_examples",
    "make_trials",
    "origins",
    "summarise",
    "summarise_comparison",
]
