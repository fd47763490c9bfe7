"""Retrieval-augmented generation without prefilling the same text twice."""

from cached_rag.config import METHODS, GenerationConfig, StoreConfig
from cached_rag.engine import Engine, Generation, Stream
from cached_rag.errors import (
    CachedRAGError,
    ConfigError,
    ContextOverflowError,
    CorruptBlobError,
    DocumentError,
    IndexMismatchError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    RelocationError,
    StoreError,
    StoreFullError,
)
from cached_rag.model import LanguageModel, load_model, wrap_model
from cached_rag.rag import Answer, AnswerStream, CachedRAG, IngestSummary
from cached_rag.report import Report

__version__ = "0.1.0"
