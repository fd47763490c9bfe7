"""What a user measures: quality and speed of every method against full prefill.

The sweeps behind the docs' figures stand in docs/experiments, which is not in the wheel.
"""

from cached_rag.evaluation.data import Example, load_examples
from cached_rag.evaluation.journal import Journal, origins
from cached_rag.evaluation.run import Settings, evaluate
from cached_rag.evaluation.summary import summarise
from cached_rag.evaluation.trial import Trial, make_trials

__all__ = [
    "Example",
    "Journal",
    "Settings",
    "Trial",
    "evaluate",
    "load_examples",
    "make_trials",
    "origins",
    "summarise",
]
