"""Finds the chunks that a question is answered from, and puts them in order (reranking)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ConfigError, ModelNotFoundError, needs_extra
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.hit import Hit
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.settings import Reranker, Reranking, Retrieval

# Below this similarity a chunk hardly concerns the question (sentence-transformers' models).
_FAR = 0.25


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
    reranking: Reranking,
    by: str,
) -> Retrieved:
    """The chunks nearest to a text.

    Args:
        reranking: has a reranker that is no name.
        by: "vectors", "words" or "hybrid"; see `Search.nearest`.

    Raises:
        ConfigError: an empty text or index, a text of half characters, a filter by what no chunk
            has, or a reranker that does not give a score for each text.
    """
    check_question(text)
    reranker = reranking.reranker
    reach = max(wanted.k, reranking.candidates) if reranker else wanted.k
    near = index.search(embedder.embed([text])[0], reach, wanted.where, text=text, by=by)
    if not near and not index.count()[1]:
        raise ConfigError("the index is empty; ingest documents first")
    least = -math.inf if wanted.min_score is None else wanted.min_score
    hits = [hit for hit in near if hit.score >= least]
    if reranker and hits:
        assert not isinstance(reranker, str)
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


def loadable(reranking: Reranking, device: str | None) -> Reranking:
    """With a function in place of a name; it loads the cross-encoder when it is first called.

    Raises, when it is called:
        ModelNotFoundError: there is no such model, or it is none that scores.
        MissingPackageError: sentence-transformers is not installed.
    """
    if not isinstance(reranking.reranker, str):
        return reranking
    return replace(reranking, reranker=_cross_encoder(reranking.reranker, device))


def _cross_encoder(name: str, device: str | None) -> Reranker:

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
