"""What an index is made with: its settings' defaults, and what they mean for chunks.

Knows names; knows no model.
"""

from __future__ import annotations

from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from cached_rag.library.context import PRIMER, Context
from cached_rag.rag import DEFAULT_EMBEDDING, DocumentIndex, Embeddings

SYSTEM = "Answer the question with the help of the documents. Be brief and exact."
DEFAULTS = {
    "model": DEFAULT_MODEL,
    "embedding": DEFAULT_EMBEDDING,
    "chunk_tokens": "256",
    "codec": "raw",
    "context": "primer",
    "system": SYSTEM,
}


def context_kind(text: str) -> tuple[str, int]:
    """("none" | "primer" | "both" | "neighbours", how many).

    Raises:
        ConfigError: it is none of these.
    """
    kind, _, count = text.partition(":")
    is_counted = kind == "neighbours" and count.isdigit() and int(count) > 0
    if not is_counted and text not in ("none", "primer", "both"):
        raise ConfigError(f"context {text!r} is not one of none, primer, both, neighbours:n")
    return kind, int(count or 0)


def contexts(text: str, index: DocumentIndex, embedder: Embeddings) -> tuple[Context | None, ...]:
    """What chunks are encoded behind, besides the head, in this order; errors as above."""
    kind, count = context_kind(text)
    if kind != "neighbours":
        return {"none": (None,), "primer": (PRIMER,), "both": (None, PRIMER)}[kind]

    def nearest(text: str) -> list[str]:
        hits = index.search(embedder.embed([text])[0], count + 1)
        return [hit.text for hit in reversed(hits) if hit.text != text][-count:]

    return None, Context(f"neighbours:{count}", nearest)
