"""Retrieval-augmented generation without prefilling the same text twice.

A name is imported when it is first used: `import cached_rag` itself loads no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cached_rag.backends.transformers.loading import load_model, wrap_model
    from cached_rag.backends.transformers.model import LanguageModel
    from cached_rag.config import (
        METHODS,
        BatchConfig,
        GenerationConfig,
        StoreConfig,
    )
    from cached_rag.defaults import DEFAULT_MODEL
    from cached_rag.engine.base import Prompt
    from cached_rag.engine.decoding import Generation, TokenLogprobs
    from cached_rag.engine.engine import Engine
    from cached_rag.engine.learner import Encode, Learner
    from cached_rag.engine.report import Report
    from cached_rag.engine.stream import Stream
    from cached_rag.engine.template_head import template_head
    from cached_rag.engine.tools import CallPart, GrowingAnswer, Tools
    from cached_rag.errors import (
        BusyError,
        CachedRAGError,
        ClosedError,
        ClusterError,
        ConfigError,
        ContextOverflowError,
        CorruptBlobError,
        CutOffError,
        DocumentError,
        EvaluationError,
        IndexMismatchError,
        MissingPackageError,
        ModelError,
        ModelNotFoundError,
        PMLError,
        RelocationError,
        StoreError,
        StoreFullError,
        needs_extra,
    )
    from cached_rag.explain import Explanation
    from cached_rag.grammar.grammar import Grammar
    from cached_rag.grammar.tools import ToolCall
    from cached_rag.hints import unknown_settings
    from cached_rag.library.context import PRIMER, Context, primer
    from cached_rag.library.encode import EncodeSummary
    from cached_rag.library.handoff import Handoff
    from cached_rag.library.ledger import Ledger
    from cached_rag.pml import Import, Said, Schema, SchemaPrompt
    from cached_rag.rag import DocumentLimits, Embedder, Hit, IndexedDocument
    from cached_rag.rag.answer import Answer, AnswerStream
    from cached_rag.rag.chat import Chat
    from cached_rag.rag.folder import Deletion
    from cached_rag.rag.ingest import IngestSummary
    from cached_rag.rag.progress import Progress, encode_progress
    from cached_rag.rag.rag import CachedRAG
    from cached_rag.rag.workers import (
        IngestRecipe,
        IngestTask,
        IngestWorker,
        IngestWorkers,
        PreparedBatch,
        PreparedDocument,
    )

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_MODEL",
    "METHODS",
    "PRIMER",
    "Answer",
    "AnswerStream",
    "BatchConfig",
    "BusyError",
    "CachedRAG",
    "CachedRAGError",
    "CallPart",
    "Chat",
    "ClosedError",
    "ClusterError",
    "ConfigError",
    "Context",
    "ContextOverflowError",
    "CorruptBlobError",
    "CutOffError",
    "Deletion",
    "DocumentError",
    "DocumentLimits",
    "Embedder",
    "Encode",
    "EncodeSummary",
    "Engine",
    "EvaluationError",
    "Explanation",
    "Generation",
    "GenerationConfig",
    "Grammar",
    "GrowingAnswer",
    "Handoff",
    "Hit",
    "Import",
    "IndexMismatchError",
    "IndexedDocument",
    "IngestRecipe",
    "IngestSummary",
    "IngestTask",
    "IngestWorker",
    "IngestWorkers",
    "LanguageModel",
    "Learner",
    "Ledger",
    "MissingPackageError",
    "ModelError",
    "ModelNotFoundError",
    "PMLError",
    "PreparedBatch",
    "PreparedDocument",
    "Progress",
    "Prompt",
    "RelocationError",
    "Report",
    "Said",
    "Schema",
    "SchemaPrompt",
    "StoreConfig",
    "StoreError",
    "StoreFullError",
    "Stream",
    "TokenLogprobs",
    "ToolCall",
    "Tools",
    "encode_progress",
    "load_model",
    "needs_extra",
    "primer",
    "template_head",
    "unknown_settings",
    "wrap_model",
]

_PLACES = {
    "backends.transformers.loading": (
        "load_model",
        "wrap_model",
    ),
    "backends.transformers.model": ("LanguageModel",),
    "config": (
        "METHODS",
        "BatchConfig",
        "GenerationConfig",
        "StoreConfig",
    ),
    "defaults": ("DEFAULT_MODEL",),
    "engine.base": ("Prompt",),
    "engine.decoding": (
        "Generation",
        "TokenLogprobs",
    ),
    "engine.engine": ("Engine",),
    "engine.learner": (
        "Encode",
        "Learner",
    ),
    "engine.report": ("Report",),
    "engine.stream": ("Stream",),
    "engine.template_head": ("template_head",),
    "engine.tools": (
        "CallPart",
        "GrowingAnswer",
        "Tools",
    ),
    "errors": (
        "BusyError",
        "CachedRAGError",
        "ClosedError",
        "ClusterError",
        "ConfigError",
        "ContextOverflowError",
        "CorruptBlobError",
        "CutOffError",
        "DocumentError",
        "EvaluationError",
        "IndexMismatchError",
        "MissingPackageError",
        "ModelError",
        "ModelNotFoundError",
        "PMLError",
        "RelocationError",
        "StoreError",
        "StoreFullError",
        "needs_extra",
    ),
    "explain": ("Explanation",),
    "grammar.grammar": ("Grammar",),
    "grammar.tools": ("ToolCall",),
    "hints": ("unknown_settings",),
    "library.context": (
        "PRIMER",
        "Context",
        "primer",
    ),
    "library.encode": ("EncodeSummary",),
    "library.handoff": ("Handoff",),
    "library.ledger": ("Ledger",),
    "pml": (
        "Import",
        "Said",
        "Schema",
        "SchemaPrompt",
    ),
    "rag": (
        "DocumentLimits",
        "Embedder",
        "Hit",
        "IndexedDocument",
    ),
    "rag.answer": (
        "Answer",
        "AnswerStream",
    ),
    "rag.chat": ("Chat",),
    "rag.folder": ("Deletion",),
    "rag.ingest": ("IngestSummary",),
    "rag.progress": (
        "Progress",
        "encode_progress",
    ),
    "rag.rag": ("CachedRAG",),
    "rag.workers": (
        "IngestRecipe",
        "IngestTask",
        "IngestWorker",
        "IngestWorkers",
        "PreparedBatch",
        "PreparedDocument",
    ),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
