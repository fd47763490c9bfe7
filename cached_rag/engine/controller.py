"""The loading controller (CacheBlend, section 5.2): how much to recompute, and from where to load.

Recompute that hides behind loading is free, so the ratio rises until the two take equally long,
never below the floor at which quality is kept; a module that loads more slowly than it is computed
is computed. Knows rates; knows neither stores nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cached_rag.engine.profile import Profile


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

    def decide(self, modules: Sequence[tuple[int, int, str]]) -> Decision:
        """Decide for modules, each given as (tokens before it, tokens, tier that has it)."""
        loaded = tuple(self.is_worth_loading(n, tier, preceding) for preceding, n, tier in modules)
        kept = [module for module, is_kept in zip(modules, loaded, strict=True) if is_kept]
        loading = sum(self.profile.load_s(count, tier) for _, count, tier in kept)
        computing = sum(self.profile.compute_s(count, preceding) for preceding, count, _ in kept)
        hidden = loading / computing if kept else 0.0
        ratio = min(1.0, max(self.floor, hidden))
        why = "the floor" if ratio == self.floor else "what hides behind loading"
        reason = (
            f"{len(kept)} of {len(modules)} modules loaded, {sum(n for _, n, _ in kept)} tokens "
            f"in {loading * 1000:.1f} ms; ratio {ratio:.3f} is {why} and takes "
            f"{ratio * computing * 1000:.1f} ms"
        )
        return Decision(ratio, loaded, reason)

    def is_worth_loading(self, tokens: int, tier: str, preceding: int = 0) -> bool:
        """Whether a module that stands behind other tokens is sooner loaded than computed."""
        return self.profile.load_s(tokens, tier) < self.profile.compute_s(tokens, preceding)

    def cheapest_tier(
        self, tokens: int, ratio: float, tiers: Mapping[str, float], preceding: int = 0
    ) -> str | None:
        """For a fixed ratio, the cheapest tier whose loading hides behind the recompute.

        Args:
            tiers: price of each tier, in any unit.
            preceding: tokens before the module.

        Returns:
            None if even the fastest adds delay.
        """
        room = ratio * self.profile.compute_s(tokens, preceding)
        hiding = [tier for tier in tiers if self.profile.load_s(tokens, tier) <= room]
        return min(hiding, key=lambda tier: tiers[tier], default=None)
