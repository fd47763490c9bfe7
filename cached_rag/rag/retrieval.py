"""Finds the chunks that a question is answered from, and puts them in order (reranking)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any

from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ConfigError, ModelNotFoundError, needs_extra
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.filters import Where
from cached_rag.rag.hit import Hit
from cached_rag.rag.index import DocumentIndex

# Below this similarity a chunk hardly concerns the question (sentence-transformers' models).
_FAR = 0.25
# The nearest chunks beyond these hardly concern a question, and would take minutes to read.
MOST_CHUNKS = 100

# Told a question and texts, says how well each of them answers it; the higher, the better.
Reranker = Callable[[str, list[str]], Sequence[float]]


@dataclass(frozen=True)
class Retrieval:
    """Which chunks are wanted; see `CachedRAG.ask`.

    Raises:
        ConfigError: k is no number from 1 to 100, or `min_score` none from -1 to 1.

    Attributes:
        answer_anyway: whether a question is answered for which there is no chunk.
    """

    k: int = 6
    min_score: float | None = None
    where: Where | None = None
    answer_anyway: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.k, Integral) or not 1 <= self.k <= MOST_CHUNKS:
            raise ConfigError(
                f"k, the number of chunks, must be from 1 to {MOST_CHUNKS}, not {self.k!r}"
            )
        if self.min_score is None:
            return
        if not isinstance(self.min_score, Real) or not -1 <= self.min_score <= 1:
            raise ConfigError(
                "min_score is a number from -1 to 1, as a cosine similarity is, or None; not "
                f"{self.min_score!r}"
            )


@dataclass(frozen=True)
class Retrieved:
    """What a search found, best first, and what to tell the user about it."""

    hits: tuple[Hit, ...]
    notes: tuple[str, ...]

    def noting(self, note: str) -> Retrieved:
        """With one more thing to tell."""
        return Retrieved(self.hits, (*self.notes, note))


def find(
    index: DocumentIndex,
    embedder: Embeddings,
    text: str,
    wanted: Retrieval,
    reranker: Reranker | None = None,
    candidates: int = 0,
    by: str = "vectors",
) -> Retrieved:
    """The chunks nearest to a text.

    Args:
        by: "vectors", "words" or "hybrid"; see `Search.nearest`.
        reranker: puts the nearest `candidates` chunks, at least k, into another order, of which the
            first k are taken; None keeps the order of similarity.

    Raises:
        ConfigError: an empty text or index, a text of half characters, a filter by what no chunk
            has, or a reranker that does not give a score for each text.
    """
    check_question(text)
    reach = max(wanted.k, candidates) if reranker else wanted.k
    near = index.search(embedder.embed([text])[0], reach, wanted.where, text=text, by=by)
    if not near and not index.count()[1]:
        raise ConfigError("the index is empty; ingest documents first")
    least = -math.inf if wanted.min_score is None else wanted.min_score
    hits = [hit for hit in near if hit.score >= least]
    if reranker and hits:
        hits = _reranked(reranker, text, hits)
    return Retrieved(tuple(hits[: wanted.k]), tuple(_remarks(near, hits)))


def check_question(text: str) -> None:
    """Refuse what cannot be searched for.

    Raises:
        ConfigError: there is nothing but white space, or half a character.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("a question needs some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a question has half of a surrogate pair at character {error.start}, which is no "
            "character; leave it out, or decode the text it comes from as a whole"
        ) from error


def _reranked(reranker: Reranker, text: str, hits: Sequence[Hit]) -> list[Hit]:
    scores = list(reranker(text, [hit.text for hit in hits]))
    if len(scores) != len(hits):
        raise ConfigError(f"the reranker gave {len(scores)} scores for {len(hits)} texts")
    order = sorted(range(len(hits)), key=lambda place: -float(scores[place]))
    return [hits[place] for place in order]


def _remarks(near: Sequence[Hit], hits: Sequence[Hit]) -> list[str]:
    """What to tell the user about the chunks that are near, and those of them that are taken."""
    if not near:
        return ["no chunk fits the filter, or has a word of the question, so none was used"]
    best = max(hit.score for hit in near)
    if not hits:
        return [f"no chunk reaches min_score (the nearest has {best:.2f}), so none was used"]
    if best < _FAR:
        return [
            f"the nearest chunk is hardly about this (score {best:.2f}); the answer may be made up"
        ]
    return []


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
