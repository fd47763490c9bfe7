"""CacheBlend: the tokens whose keys and values deviate most."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import LayerCheck, Layout, Selector
from cached_rag.options import check_range, require

# Gradual filtering begins with 1.5 r and ends with 0.5 r at the last layer: r on average.
_SPAN = 0.5
_SCORES = ("values", "keys", "kv")


@dataclass(frozen=True)
class CacheBlend(Selector):
    """Recomputes the share r of the chunks' tokens whose keys or values deviate most.

    A token whose values change when it is read in its place attends to other chunks, and one that
    deviates in one layer does so in the next. So all rows run through the first layer that attends;
    at the check layer what is fresh is compared with what was cached, and from there on only the
    most deviating rows and the live ones are computed.

    Paper: CacheBlend (Yao et al., EuroSys 2025), sections 4.2 and 4.3,
    https://arxiv.org/abs/2405.16444. Unlike in its authors' released scripts, the whole question
    is computed, and every row sees just the keys before it.

    Cost: the live tokens, r, and two layers of everything: dear for models of few layers. Use it
    where attention cannot be watched, for it asks no question.

    Attributes:
        recompute_ratio: share r of the reused tokens that is recomputed.
        check_layer: where deviations are measured, counted from the first layer that attends (>= 1:
            up to that one there are none).
        gradual: the paper's gradual filtering (Figure 9): measured again at every layer from the
            check layer on, r on average.
        score: what deviates: the "values" (the authors' released code) or the "keys" (LMCache),
            squared differences; or both, "kv": the paper's KV deviation (section 4.1), absolute
            differences of keys and values together.
    """

    name: ClassVar[str] = "cacheblend"

    recompute_ratio: float = 0.15
    check_layer: int = 1
    gradual: bool = False
    score: str = "values"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ", ".join(_SCORES)
        require(self.score in _SCORES, f"score is one of {known}, not {self.score!r}")
        check_range(self, 1, math.inf, "check_layer")

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """Every row that is not exact."""
        return ~layout.exact

    def check_layers(self, layout: Layout) -> tuple[int, ...]:
        """The check layer, and with `gradual` all after it."""
        if self.recompute_ratio == 1.0:
            return ()
        found = range(layout.first_attending + self.check_layer, layout.num_layers)
        attending = layout.num_layers - layout.first_attending
        require(
            bool(found),
            f"check_layer {self.check_layer}: from the first layer that attends there are "
            f"{attending} layers",
        )
        return tuple(found if self.gradual else found[:1])

    def narrow(self, check: LayerCheck, layout: Layout) -> torch.Tensor:
        """The rows that deviate most, within this layer's share of all reused tokens."""
        share = self._share(check.layer, self.check_layers(layout))
        budget = min(int(share * int(layout.reused.sum())), int(check.reused.sum()))
        deviation = self.deviation(check).masked_fill(~check.reused, float("-inf"))
        keep = ~check.reused
        keep[deviation.topk(budget).indices] = True
        return keep

    def deviation(self, check: LayerCheck) -> torch.Tensor:
        """(num_rows,) how far fresh is from cached, summed over heads and dimensions."""
        keys = check.fresh_keys.float() - check.cached_keys.float()
        values = check.fresh_values.float() - check.cached_values.float()
        if self.score == "kv":
            return keys.abs().sum(dim=(0, 2)) + values.abs().sum(dim=(0, 2))
        return (keys if self.score == "keys" else values).square().sum(dim=(0, 2))

    def _share(self, layer: int, layers: tuple[int, ...]) -> float:
        if len(layers) == 1:
            return self.recompute_ratio
        done = layers.index(layer) / (len(layers) - 1)
        return min(1.0, self.recompute_ratio * (1 + _SPAN - 2 * _SPAN * done))
