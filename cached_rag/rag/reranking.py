"""A reranker by name: a cross-encoder of sentence-transformers. Knows no index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ModelNotFoundError, needs_extra

# Told a question and texts, says how well each of them answers it; the higher, the better.
Reranker = Callable[[str, list[str]], Sequence[float]]


def cross_encoder(name: str, device: str | None = None) -> Reranker:
    """A reranker that loads a cross-encoder when it is first called.

    Args:
        name: a hub id or a folder.

    Raises:
        ModelNotFoundError: when it is called: there is no such model, or it is none that scores.
        MissingPackageError: likewise: sentence-transformers is not installed.
    """

    @cache
    def loaded() -> Any:
        with needs_extra("rag", "reranking"):
            from sentence_transformers import CrossEncoder
        try:
            return CrossEncoder(name, device=device, num_labels=1)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"cannot load the reranker {name!r}: {error}. Give a cross-encoder's hub id, such "
                "as cross-encoder/ms-marco-MiniLM-L6-v2, or its folder."
            ) from error

    def rerank(question: str, texts: list[str]) -> Sequence[float]:
        pairs = [(question, text) for text in texts]
        scores: Sequence[float] = on_model_thread(
            lambda: loaded().predict(pairs, show_progress_bar=False).tolist()
        )
        return scores

    return rerank
