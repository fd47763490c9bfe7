"""What a user measures: quality and speed of every method against full prefill.

The sweeps behind the docs' figures stand in docs/experiments, which is not in the wheel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cached_rag.lazily import imports_from

if TYPE_CHECKING:
    from cached_rag.evaluation.data import Example, Questions, load_examples
    from cached_rag.evaluation.journal import Journal, origins
    from cached_rag.evaluation.run import Settings, evaluate
    from cached_rag.evaluation.summary import summarise
    from cached_rag.evaluation.trial import Trial, make_trials

_PLACES = {
    "data": ("Example", "Questions", "load_examples"),
    "journal": ("Journal", "origins"),
    "run": ("Settings", "evaluate"),
    "summary": ("summarise",),
    "trial": ("Trial", "make_trials"),
}

__all__ = [
    "Example",
    "Journal",
    "Questions",
    "Settings",
    "Trial",
    "evaluate",
    "load_examples",
    "make_trials",
    "origins",
    "summarise",
]

__getattr__ = imports_from(_PLACES, __name__, __name__)
