"""The loading controller (CacheBlend, section 5.2): how much to recompute, and what to load.

Tokens are recomputed while KV is loaded. As long as recomputing takes no longer than loading, it
delays nothing. So the controller raises the recompute ratio until both take equally long; it never
goes below the floor that quality needs. A chunk that is computed faster than it is loaded is not
loaded. Knows rates; knows neither stores nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.engine.profile import Profile
from cached_rag.kv.remote import Link


@dataclass(frozen=True)
class Decision:
    """What to do with one prompt's chunks.

    Attributes:
        recompute_ratio: share of the loaded tokens to recompute.
        loaded: for each chunk, whether to load it; the others are computed.
        reason: the decision in words, with the times that led to it.
    """

    recompute_ratio: float
    loaded: tuple[bool, ...]
    reason: str


def refusal(profile: Profile, link: Link, tokens: int) -> str:
    """Why KV of `tokens` tokens is not to be brought from a remote store; empty if it is.

    It is as long as nothing is known of the way there, and now and then to learn of it again.
    """
    loading, computing = link.load_s(tokens), profile.compute_s(tokens)
    if loading is None or loading < computing:
        return ""
    return (
        f"KV of {tokens} tokens would take {loading * 1000:.0f} ms from the remote store, and "
        f"{computing * 1000:.0f} ms to compute, so it is computed"
    )


@dataclass(frozen=True)
class Controller:
    """Decides by the rates of a profile.

    Attributes:
        floor: the smallest recompute ratio that is allowed (r* in the paper).
    """

    profile: Profile
    floor: float

    def decide(self, chunks: Sequence[tuple[int, int, str]]) -> Decision:
        """Decide for the chunks of a prompt.

        Args:
            chunks: (number of tokens before it, number of its tokens, "memory" or "disk") each.
        """
        loaded = tuple(self.is_worth_loading(n, tier, preceding) for preceding, n, tier in chunks)
        kept = [chunk for chunk, is_kept in zip(chunks, loaded, strict=True) if is_kept]
        loading = sum(self.profile.load_s(count, tier) for _, count, tier in kept)
        computing = sum(self.profile.compute_s(count, preceding) for preceding, count, _ in kept)
        hidden = loading / computing if kept else 0.0
        ratio = min(1.0, max(self.floor, hidden))
        why = "the floor" if ratio == self.floor else "what hides behind loading"
        reason = (
            f"{len(kept)} of {len(chunks)} chunks loaded, {sum(n for _, n, _ in kept)} tokens "
            f"in {loading * 1000:.1f} ms; ratio {ratio:.3f} is {why} and takes "
            f"{ratio * computing * 1000:.1f} ms"
        )
        return Decision(ratio, loaded, reason)

    def is_worth_loading(self, tokens: int, tier: str, preceding: int = 0) -> bool:
        """Whether a chunk behind `preceding` other tokens is loaded faster than computed."""
        return self.profile.load_s(tokens, tier) < self.profile.compute_s(tokens, preceding)
