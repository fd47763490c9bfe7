"""CacheBlend (sections 4.2 and 4.3): recompute the tokens whose values deviate most.

All rows run through layer 0; at the check layer the fresh values are compared with the cached
ones, and from there on only the most deviating rows and the live ones are computed. Unlike the
authors' released scripts, every question token is live.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.errors import ConfigError
from cached_rag.selectors.base import LayerCheck, Layout

# The gradual schedule falls from 1.5 r at the check layer to 0.5 r at the last: r on average.
_GRADUAL_SPAN = 0.5


@dataclass(frozen=True)
class CacheBlend:
    """Top-r by squared deviation of the values.

    Attributes:
        recompute_ratio: share r of the reused tokens that is recomputed.
        check_layer: where deviations are measured (>= 1: values of layer 0 never deviate).
        gradual: the paper's gradual filtering (Figure 9): measured again at every later layer,
            keeping fewer and fewer rows, r on average.
    """

    recompute_ratio: float = 0.15
    check_layer: int = 1
    gradual: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio is a share, 0 to 1, not {self.recompute_ratio}")
        if self.check_layer < 1:
            raise ConfigError("check_layer must be >= 1: layer 0's values depend on no other token")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """Every row that is not exact."""
        return ~layout.exact

    def check_layers(self, layout: Layout) -> tuple[int, ...]:
        """The check layer, and with `gradual` all after it."""
        if self.recompute_ratio == 1.0 or self.check_layer >= layout.num_layers:
            return ()
        last = layout.num_layers if self.gradual else self.check_layer + 1
        return tuple(range(self.check_layer, last))

    def narrow(self, check: LayerCheck, layout: Layout) -> torch.Tensor:
        """The rows that deviate most, within this layer's share of all reused tokens."""
        share = self._ratio(check.layer, layout.num_layers)
        budget = min(int(share * int(layout.reused.sum())), int(check.reused.sum()))
        difference = check.fresh_values.float() - check.cached_values.float()
        deviation = difference.square().sum(dim=(0, 2))
        deviation = deviation.masked_fill(~check.reused, float("-inf"))
        keep = ~check.reused
        keep[deviation.topk(budget).indices] = True
        return keep

    def _ratio(self, layer: int, num_layers: int) -> float:
        if not self.gradual:
            return self.recompute_ratio
        done = (layer - self.check_layer) / max(1, num_layers - 1 - self.check_layer)
        return min(1.0, self.recompute_ratio * (1 + _GRADUAL_SPAN - 2 * _GRADUAL_SPAN * done))
