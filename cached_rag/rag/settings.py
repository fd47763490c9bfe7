"""The settings of an index: their defaults, and what the context setting means.

Knows names; knows no model.
"""

from __future__ import annotations

from cached_rag.config import MOST_PRIMERS
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from cached_rag.library.context import Context, primer
from cached_rag.rag.embedding import DEFAULT_EMBEDDING

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


def contexts(text: str) -> tuple[Context | None, ...]:
    """What chunks are encoded behind, besides the prompt's head, one pass for each.

    Args:
        text: the setting; None among the results stands for nothing.

    Raises:
        ConfigError: a context that does not exist.
    """
    kind, count = _parsed(text)
    if kind == "none":
        return (None,)
    return (primer(count), None) if kind == "both" else (primer(count),)


def encodings(text: str) -> int:
    """How many KVs a chunk has by this setting of the context, see `contexts`."""
    return len(contexts(text))


def _parsed(text: str) -> tuple[str, int]:
    """The kind of context and the number of primers."""
    kind, _, number = text.partition(":")
    count = int(number) if number.isdecimal() else int(text in ("primer", "both"))
    is_known = kind in ("primer", "both") and 1 <= count <= MOST_PRIMERS
    if not is_known and text != "none":
        raise ConfigError(
            f"context {text!r} is not one of none, primer, both, primer:n, both:n (n from 1 to "
            f"{MOST_PRIMERS})"
        )
    return kind, count
