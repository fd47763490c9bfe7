"""The loading controller (CacheBlend, section 5.2): how much to recompute, and from where to load.

Recompute that hides behind loading is free, so the ratio rises until the two take equally long,
never below the floor at which quality is kept; a module that loads more slowly than it is computed
is computed. Knows rates; knows neither stores nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cached_rag.profile import Profile


@dataclass(frozen=True)
class Decision:
    """What to do with one prompt's modules.

    Attributes:
        recompute_ratio: share of the loaded tokens to recompute.
        loaded: for each module, whether to load it (else it is computed).
        reason: in words, with the times that decided.
    """

    recompute_ratio: float
    loaded: tuple[bool, ...]
    reason: str


@dataclass(frozen=True)
class Controller:
    """Decides by a profile.

    Attributes:
        floor: the recompute ratio r* below which quality suffers.
    """

    profile: Profile
    floor: float

    def decide(self, modules: Sequence[tuple[int, str]]) -> Decision:
        """Decide for modules, each given as (tokens, tier that has it)."""
        loaded = tuple(self.is_worth_loading(tokens, tier) for tokens, tier in modules)
        kept = [module for module, is_kept in zip(modules, loaded, strict=True) if is_kept]
        tokens = sum(count for count, _ in kept)
        loading = sum(self.profile.load_s(count, tier) for count, tier in kept)
        hidden = loading / self.profile.compute_s(tokens) if tokens else 0.0
        ratio = min(1.0, max(self.floor, hidden))
        return Decision(ratio, loaded, self._reason(ratio, tokens, loading, len(modules), kept))

    def is_worth_loading(self, tokens: int, tier: str) -> bool:
        """Whether a module is sooner loaded than computed."""
        return self.profile.load_s(tokens, tier) < self.profile.compute_s(tokens)

    def cheapest_tier(self, tokens: int, ratio: float, tiers: Mapping[str, float]) -> str | None:
        """For a fixed ratio, the cheapest tier whose loading hides behind the recompute.

        Args:
            tiers: price of each tier, in any unit.

        Returns:
            None if even the fastest adds delay.
        """
        room = self.profile.compute_s(ratio * tokens)
        hiding = [tier for tier in tiers if self.profile.load_s(tokens, tier) <= room]
        return min(hiding, key=lambda tier: tiers[tier], default=None)

    def _reason(
        self, ratio: float, tokens: int, loading: float, count: int, kept: Sequence[object]
    ) -> str:
        computing = self.profile.compute_s(ratio * tokens)
        why = "the floor" if ratio == self.floor else "what hides behind loading"
        return (
            f"{len(kept)} of {count} modules loaded, {tokens} tokens in {loading * 1000:.1f} ms; "
            f"ratio {ratio:.3f} is {why} and takes {computing * 1000:.1f} ms"
        )
