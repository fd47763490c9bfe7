"""Contexts: texts that stand between the prefix and a chunk while the chunk is encoded.

A chunk that is encoded right behind the prefix gets the KV of a prompt's first text, which it
rarely is when it is used. With any other text before it, its KV is nearer to what full prefill
would compute (docs/quality.md). FusionRAG takes the chunk's nearest neighbours as this text. Knows
texts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from cached_rag.kv.fingerprint import digest


@dataclass(frozen=True)
class Context:
    """Passages that stand before a chunk while it is encoded. Their own KV is not kept with it.

    Attributes:
        name: part of the KV's identity, so different contexts need different names.
        before: gives the passages for a chunk's text; the last one stands right before the chunk.
            If the model's context has no room for all, the first ones are left out.
    """

    name: str
    before: Callable[[str], Sequence[str]]

    @classmethod
    def fixed(cls, *passages: str) -> Context:
        """A context with the same passages before every chunk."""
        return cls(f"fixed:{digest(*passages)}", lambda _: passages)


def _primer() -> Context:
    text = resources.files("cached_rag.library").joinpath("primer.txt").read_text(encoding="utf-8")
    return Context.fixed(*text.strip().split("\n\n"))


# Four short passages about nothing in particular. They are the same for all chunks, so their KV is
# computed once, and encoding costs no more than without them.
PRIMER = _primer()
