"""For those who write integrations and backends: what these are made of, and no user needs.

A name is imported when it is first used. It may change between minor versions; the names of
`cached_rag` itself do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cached_rag.lazily import imports_from

if TYPE_CHECKING:
    from cached_rag.backends.transformers.model import LanguageModel
    from cached_rag.defaults import DEFAULT_MODEL
    from cached_rag.engine.decoding import Generation, TokenLogprobs
    from cached_rag.engine.learner import Encode, Learner
    from cached_rag.engine.planner import Prompt
    from cached_rag.engine.stream import Stream
    from cached_rag.engine.template_head import template_head
    from cached_rag.engine.tools import CallPart, GrowingAnswer
    from cached_rag.grammar.tools import ToolCall
    from cached_rag.library.encode import EncodeSummary
    from cached_rag.library.handoff import Handoff
    from cached_rag.library.ledger import Ledger
    from cached_rag.methods import METHODS
    from cached_rag.options import Setting, parted, settings_of, unknown_settings
    from cached_rag.pml import SchemaPrompt
    from cached_rag.rag.index import IndexedDocument
    from cached_rag.rag.progress import Progress, encode_progress
    from cached_rag.rag.rag import Deletion
    from cached_rag.rag.workers import (
        IngestRecipe,
        IngestTask,
        IngestWorker,
        IngestWorkers,
        PreparedBatch,
        PreparedDocument,
    )

__all__ = [
    "DEFAULT_MODEL",
    "METHODS",
    "CallPart",
    "Deletion",
    "Encode",
    "EncodeSummary",
    "Generation",
    "GrowingAnswer",
    "Handoff",
    "IndexedDocument",
    "IngestRecipe",
    "IngestTask",
    "IngestWorker",
    "IngestWorkers",
    "LanguageModel",
    "Learner",
    "Ledger",
    "PreparedBatch",
    "PreparedDocument",
    "Progress",
    "Prompt",
    "SchemaPrompt",
    "Setting",
    "Stream",
    "TokenLogprobs",
    "ToolCall",
    "encode_progress",
    "parted",
    "settings_of",
    "template_head",
    "unknown_settings",
]

_PLACES = {
    "backends.transformers.model": ("LanguageModel",),
    "defaults": ("DEFAULT_MODEL",),
    "engine.decoding": (
        "Generation",
        "TokenLogprobs",
    ),
    "engine.learner": (
        "Encode",
        "Learner",
    ),
    "engine.stream": ("Stream",),
    "engine.planner": ("Prompt",),
    "engine.template_head": ("template_head",),
    "engine.tools": (
        "CallPart",
        "GrowingAnswer",
    ),
    "grammar.tools": ("ToolCall",),
    "library.encode": ("EncodeSummary",),
    "library.handoff": ("Handoff",),
    "library.ledger": ("Ledger",),
    "methods": ("METHODS",),
    "options": ("Setting", "parted", "settings_of", "unknown_settings"),
    "pml": ("SchemaPrompt",),
    "rag.index": ("IndexedDocument",),
    "rag.progress": (
        "Progress",
        "encode_progress",
    ),
    "rag.rag": ("Deletion",),
    "rag.workers": (
        "IngestRecipe",
        "IngestTask",
        "IngestWorker",
        "IngestWorkers",
        "PreparedBatch",
        "PreparedDocument",
    ),
}

__getattr__ = imports_from(_PLACES, __name__, "cached_rag")
