"""What stands between the prefix and a module while the module is encoded.

A module read right behind the prefix takes itself for the first text of a prompt; in use it rarely
is. Text before it, any text, brings its KV nearer to what it will be (docs/quality.md); nearest
neighbours are FusionRAG's offline step. Knows texts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from cached_rag.kv.fingerprint import digest


@dataclass(frozen=True)
class Context:
    """Texts that stand before modules while they are encoded, and are not kept.

    Attributes:
        name: part of the encoded modules' identity; contexts that differ need different names.
        before: from a module's text to the passages before it, the nearest to it last. Those
            that have no room in the model's context are left out, the farthest first.
    """

    name: str
    before: Callable[[str], Sequence[str]]

    @classmethod
    def fixed(cls, *passages: str) -> Context:
        """The same passages before every module."""
        return cls(f"fixed:{digest(*passages)}", lambda _: passages)


def _primer() -> Context:
    text = resources.files("cached_rag.library").joinpath("primer.txt").read_text(encoding="utf-8")
    return Context.fixed(*text.strip().split("\n\n"))


# Four short passages about nothing in particular, the same for every index, so that modules have
# text before them and encoding them costs no more than without.
PRIMER = _primer()
