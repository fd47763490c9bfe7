"""Retrieval-augmented generation without prefilling the same text twice.

These are the names for those who use the library. Errors other than the most general stand in
`cached_rag.errors`, prompts made of modules in `cached_rag.pml`, and what integrations and backends
are made of in `cached_rag.spi`. A name is imported when it is first used: `import cached_rag`
itself loads no model library.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cached_rag.backends.transformers.loading import load_model, wrap_model
    from cached_rag.config import BatchConfig, GenerationConfig, ModelConfig, StoreConfig
    from cached_rag.engine.engine import Engine
    from cached_rag.engine.explanation import Explanation
    from cached_rag.engine.report import Report
    from cached_rag.engine.tools import Tools
    from cached_rag.errors import CachedRAGError, ConfigError
    from cached_rag.grammar.grammar import Grammar
    from cached_rag.library.encode import PRIMER, Context, primer
    from cached_rag.pml import Import, Said, Schema
    from cached_rag.rag.answer import Answer, AnswerStream
    from cached_rag.rag.asking import Chat
    from cached_rag.rag.chunks import Embedder
    from cached_rag.rag.progress import IngestSummary
    from cached_rag.rag.rag import CachedRAG
    from cached_rag.rag.search import Hit

__version__ = "0.1.0"

__all__ = [
    "PRIMER",
    "Answer",
    "AnswerStream",
    "BatchConfig",
    "CachedRAG",
    "CachedRAGError",
    "Chat",
    "ConfigError",
    "Context",
    "Embedder",
    "Engine",
    "Explanation",
    "GenerationConfig",
    "Grammar",
    "Hit",
    "Import",
    "IngestSummary",
    "ModelConfig",
    "Report",
    "Said",
    "Schema",
    "StoreConfig",
    "Tools",
    "load_model",
    "primer",
    "wrap_model",
]

_PLACES = {
    "backends.transformers.loading": ("load_model", "wrap_model"),
    "config": ("BatchConfig", "GenerationConfig", "ModelConfig", "StoreConfig"),
    "engine.engine": ("Engine",),
    "engine.report": ("Report",),
    "engine.tools": ("Tools",),
    "errors": ("CachedRAGError", "ConfigError"),
    "engine.explanation": ("Explanation",),
    "grammar.grammar": ("Grammar",),
    "library.encode": ("PRIMER", "Context", "primer"),
    "pml": ("Import", "Said", "Schema"),
    "rag.answer": ("Answer", "AnswerStream"),
    "rag.asking": ("Chat",),
    "rag.chunks": ("Embedder",),
    "rag.search": ("Hit",),
    "rag.progress": ("IngestSummary",),
    "rag.rag": ("CachedRAG",),
}


def imports_from(places: Mapping[str, Sequence[str]], module: str) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562), which raises AttributeError for other names.

    Args:
        places: the names, by the module of this package that has them.
        module: whose names they are.
    """
    homes = {name: place for place, names in places.items() for name in names}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)

    return find


__getattr__ = imports_from(_PLACES, __name__)
