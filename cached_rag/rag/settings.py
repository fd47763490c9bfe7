"""The settings of an index: their defaults, and what the context setting means.

Knows names; knows no model.
"""

from __future__ import annotations

from cached_rag.config import MOST_PRIMERS
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from cached_rag.library.context import Context, primer
from cached_rag.rag.embedding import DEFAULT_EMBEDDING, Embeddings
from cached_rag.rag.index import DocumentIndex

SYSTEM = "Answer the question with the help of the documents. Be brief and exact."
DEFAULTS = {
    "model": DEFAULT_MODEL,
    "embedding": DEFAULT_EMBEDDING,
    "chunk_tokens": "256",
    "codec": "raw",
    "context": "both",
    "system": SYSTEM,
    "search": "vectors",
    "backend": "transformers",
    "weights": "as stored",
    **dict.fromkeys(("dtype", "revision", "adapter"), ""),  # none
}
SEARCHES = ("hybrid", "vectors", "words")


def asked_for(**values: object) -> dict[str, str]:
    """Those of an index's settings that are not None, as an index keeps them: as text.

    Raises:
        ConfigError: a context, or a way to search, that does not exist.
    """
    asked = {name: str(value) for name, value in values.items() if value is not None}
    _parsed(asked.get("context", "none"))
    if (search := asked.get("search", "vectors")) not in SEARCHES:
        raise ConfigError(f"search {search!r} is not one of {', '.join(SEARCHES)}")
    return asked


def contexts(
    text: str, index: DocumentIndex | None = None, embedder: Embeddings | None = None
) -> tuple[Context | None, ...]:
    """What chunks are encoded behind, besides the prompt's head, one pass for each.

    Args:
        text: the setting; None among the results stands for nothing.
        index, embedder: to find neighbours; None in a worker, which has no index.

    Raises:
        ConfigError: a context that does not exist, or one that needs an index, without one.
    """
    kind, count = _parsed(text)
    if kind == "none":
        return (None,)
    if kind in ("primer", "both"):
        return (primer(count), None) if kind == "both" else (primer(count),)
    if index is None or embedder is None:
        raise ConfigError(
            f"context {text!r} needs the whole index for each chunk, and the workers of a cluster "
            'have none of it; make the index with context="primer", or ingest without workers'
        )

    def nearest(text: str) -> list[str]:
        hits = index.search(embedder.embed([text])[0], count + 1)
        return [hit.text for hit in reversed(hits) if hit.text != text][-count:]

    return None, Context(f"neighbours:{count}", nearest)


def encodings(text: str) -> int:
    """How many KVs a chunk has by this setting of the context, see `contexts`."""
    return 2 if _parsed(text)[0] in ("both", "neighbours") else 1


def _parsed(text: str) -> tuple[str, int]:
    """The kind of context and, of neighbours or primers, their number."""
    kind, _, number = text.partition(":")
    count = int(number) if number.isdecimal() else int(text in ("primer", "both"))
    most = {"neighbours": count, "primer": MOST_PRIMERS, "both": MOST_PRIMERS}.get(kind, 0)
    if not 1 <= count <= most and text != "none":
        raise ConfigError(
            f"context {text!r} is not one of none, primer, both, primer:n, both:n (n from 1 to "
            f"{MOST_PRIMERS}), neighbours:n"
        )
    return kind, count
