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

from cached_rag.config import MOST_PRIMERS
from cached_rag.errors import ConfigError
from cached_rag.kv.fingerprint import digest

# How the names of means begin, and of contexts with the same passages before every chunk.
MEAN, _FIXED = "mean:", "fixed:"


@dataclass(frozen=True)
class Context:
    """Passages that stand before a chunk while it is encoded. Their own KV is not kept with it.

    Attributes:
        name: part of the KV's identity, so different contexts need different names.
        before: gives the passages for a chunk's text; the last one stands right before the chunk.
            If the model's context has no room for all, the first ones are left out.
        others: contexts that a chunk is encoded in, too; its KV is the mean of all of these.
    """

    name: str
    before: Callable[[str], Sequence[str]]
    others: tuple[Context, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether it has the same passages before every chunk."""
        return self.name.startswith((_FIXED, MEAN))

    @property
    def ways(self) -> tuple[Context, ...]:
        """Itself and the others: how often a chunk is encoded."""
        return (self, *self.others)

    @classmethod
    def fixed(cls, *passages: str) -> Context:
        """A context with the same passages before every chunk."""
        return cls(f"{_FIXED}{digest(*passages, 'an empty line after each')}", lambda _: passages)

    @classmethod
    def mean(cls, *contexts: Context) -> Context:
        """A context in which a chunk's KV is the mean of that in each of these, moved to one place.

        What a text before a chunk adds to its KV is in part the same for any text, and in part that
        text's own, which another prompt does not have: the mean keeps the former and loses most of
        the latter. From no paper; docs/quality.md has what it gives.

        Raises:
            ConfigError: none is given, or one of them is a mean itself.
        """
        if not contexts or any(one.others for one in contexts):
            raise ConfigError("a mean is of one context at least, and none of them a mean itself")
        first, *others = contexts
        if not others:
            return first
        name = f"{MEAN}{digest(*(one.name for one in contexts))}"
        return cls(name, first.before, tuple(others))


def _primers() -> tuple[Context, ...]:
    text = resources.files("cached_rag.library").joinpath("primers.txt").read_text(encoding="utf-8")
    return tuple(Context.fixed(*one.strip().split("\n\n")) for one in text.split("\n---\n"))


# Each is four short passages about nothing in particular. They are the same for all chunks, so
# their own KV is computed once.
_PRIMERS = _primers()


def primer(count: int = 1) -> Context:
    """The mean of so many primers; each takes a pass over every chunk.

    Raises:
        ConfigError: there are not so many.
    """
    if not 1 <= count <= MOST_PRIMERS:
        raise ConfigError(f"there are 1 to {MOST_PRIMERS} primers, not {count}")
    return Context.mean(*_PRIMERS[:count])


PRIMER = primer()
