"""Retrieval-augmented generation without prefilling the same text twice.

These are the names for those who use the library. Errors other than the most general stand in
`cached_rag.errors`, prompts made of modules in `cached_rag.pml`, and what integrations and backends
are made of in `cached_rag.spi`. A name is imported when it is first used: `import cached_rag`
itself loads no model library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cached_rag.backends.transformers.loading import load_model as load_model
    from cached_rag.backends.transformers.loading import wrap_model as wrap_model
    from cached_rag.config import BatchConfig as BatchConfig
    from cached_rag.config import GenerationConfig as GenerationConfig
    from cached_rag.config import ModelConfig as ModelConfig
    from cached_rag.config import StoreConfig as StoreConfig
    from cached_rag.engine.engine import Engine as Engine
    from cached_rag.engine.explanation import Explanation as Explanation
    from cached_rag.engine.report import Report as Report
    from cached_rag.engine.tools import Tools as Tools
    from cached_rag.errors import CachedRAGError as CachedRAGError
    from cached_rag.errors import ConfigError as ConfigError
    from cached_rag.grammar.grammar import Grammar as Grammar
    from cached_rag.library.encode import PRIMER as PRIMER
    from cached_rag.library.encode import Context as Context
    from cached_rag.library.encode import primer as primer
    from cached_rag.pml import Import as Import
    from cached_rag.pml import Said as Said
    from cached_rag.pml import Schema as Schema
    from cached_rag.rag.answer import Answer as Answer
    from cached_rag.rag.answer import AnswerStream as AnswerStream
    from cached_rag.rag.asking import Chat as Chat
    from cached_rag.rag.chunks import Embedder as Embedder
    from cached_rag.rag.progress import IngestSummary as IngestSummary
    from cached_rag.rag.rag import CachedRAG as CachedRAG
    from cached_rag.rag.search import Hit as Hit

__version__ = "0.1.0"

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


__all__ = [name for names in _PLACES.values() for name in names]
__getattr__ = imports_from(_PLACES, __name__)
