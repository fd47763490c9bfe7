"""Moving rotated keys to other positions. Knows position rules; knows no model and no store.

RoPE rotates pairs of key dimensions by `position * inv_freq`, so keys rotated for one position
become keys for another by one further rotation by the difference (CacheBlend, appendix A). Which
dimensions pair up, how many rotate, and with which frequencies differs by model and even by layer;
`match_rule` finds the rule that explains two observations of the same tokens, and never guesses.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cached_rag.errors import RelocationError
from cached_rag.kv.layers import Layered, layers_in, stacks_of

Style = Literal["none", "half", "interleaved"]
# On a CPU, keys are rotated in parts of about so many elements, whose fp32 copies fit its caches.
_SLICE_ELEMENTS = 1 << 19
# Pairs of dimensions smaller than this share of a head's average hold nothing but rounding errors.
_LEAST_PAIR = 1e-3


@dataclass(frozen=True)
class LayerRule:
    """How one layer's keys depend on position.

    Attributes:
        style: `none` (ALiBi, NoPE), `half` (dimension i pairs with i + rotary_dim / 2) or
            `interleaved` (2i pairs with 2i + 1).
        inv_freq: (rotary_dim / 2,) radians per position; empty for `none`. Dimensions beyond
            rotary_dim do not rotate.
    """

    style: Style
    inv_freq: tuple[float, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions that rotate."""
        return 2 * len(self.inv_freq)

    def __str__(self) -> str:
        if self.style == "none":
            return "position-free"
        return f"{self.style} rotary over {self.rotary_dim} dimensions"


@dataclass(frozen=True)
class PositionRule:
    """How a model's keys depend on position.

    Attributes:
        layers: the rule of each layer's keys; empty if keys cannot be moved.
        values: the rule of each layer's values, where some are rotated as keys are, as in latent
            attention; empty if none are.
        reason: why they cannot be moved, in words; empty if they can.
        limit: sequence length beyond which the model switches frequencies (longrope, dynamic NTK);
            keys from either side of the switch do not mix.
    """

    layers: tuple[LayerRule, ...] = ()
    reason: str = ""
    limit: int | None = None
    values: tuple[LayerRule, ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"not relocatable: {self.reason}"
        parts = [f"{rule} in {count} layers" for rule, count in Counter(self.layers).items()]
        switch = f", up to {self.limit} tokens" if self.limit else ""
        return "; ".join(parts) + switch

    @property
    def is_movable(self) -> bool:
        """Whether keys can be moved to other positions."""
        return not self.reason

    def check(self, delta: int, seq_len: int) -> None:
        """See that keys may be moved.

        Args:
            delta: how far, in positions; 0 is always possible.
            seq_len: length of the prompt that they are moved into.

        Raises:
            RelocationError: the model has no rule, or the prompt is longer than its `limit`.
        """
        if delta and self.reason:
            raise RelocationError(
                f"this model's keys cannot be moved to other positions: {self.reason}. "
                'Use method="prefix" (exact prefixes) or "full".'
            )
        if self.limit is not None and seq_len > self.limit:
            raise RelocationError(
                f"a prompt of {seq_len} tokens crosses this model's rotary switch at {self.limit} "
                "tokens, where all keys change; cached keys were computed below it. "
                'Shorten the prompt or use method="full".'
            )

    def relocate(
        self,
        side: Layered,
        delta: int,
        out: Layered,
        first_layer: int = 0,
        *,
        of: Literal["keys", "values"] = "keys",
    ) -> Layered:
        """Write keys, or values, moved by `delta` positions into `out`.

        Args:
            side: (layers, num_kv_heads, seq_len, dim), rotated; not modified.
            delta: new position minus old position, the same for all tokens.
            out: same shape, any strides.
            first_layer: the layer of the model that comes first in a tensor; the next ones follow.
            of: which side it is.

        Raises:
            RelocationError: the model has no rule.
        """
        pairs = list(zip(stacks_of(side), stacks_of(out), strict=True))
        if delta == 0 or (of == "values" and not self.values):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return out
        self.check(delta, 0)
        rules = self.layers if of == "keys" else self.values
        for number, (source, target) in enumerate(pairs):
            held = [rules[first_layer + layer] for layer in layers_in(side, number)]
            _rotate_all(source, held, delta, target)
        return out


def _rotate_all(
    side: torch.Tensor, rules: Sequence[LayerRule], delta: int, out: torch.Tensor
) -> None:
    """Rotate (layers, heads, seq_len, dim) into `out`, each layer by its rule."""
    if len(set(rules)) == 1:
        _rotate(side, rules[0], delta, out)
        return
    for layer, rule in enumerate(rules):
        _rotate(side[layer : layer + 1], rule, delta, out[layer : layer + 1])


@functools.lru_cache(maxsize=1024)
def _angles(rule: LayerRule, delta: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation, (rotary_dim / 2,) fp32 each, of an angle computed in fp64.

    Kept, because a copy to a GPU is waited for, and every layer of a prompt asks for the same.
    """
    angle = torch.tensor(rule.inv_freq, dtype=torch.float64) * delta
    return angle.cos().float().to(device), angle.sin().float().to(device)


def _rotate(keys: torch.Tensor, rule: LayerRule, delta: int, out: torch.Tensor) -> None:
    """Rotate (layers, heads, seq_len, head_dim) keys into `out`, in fp32, rounded once."""
    if rule.style == "none":
        out.copy_(keys)
        return
    cos, sin = _angles(rule, delta, keys.device)
    is_cpu = keys.device.type == "cpu"
    step = max(1, _SLICE_ELEMENTS // keys[0].numel()) if is_cpu else len(keys)
    for begin in range(0, keys.shape[0], step):
        source, target = keys[begin : begin + step], out[begin : begin + step]
        first, second = _pairs(source.float(), rule)
        to_first, to_second = _pairs(target, rule)
        to_first.copy_((first * cos).addcmul_(second, sin, value=-1))
        to_second.copy_((second * cos).addcmul_(first, sin))
        if rule.rotary_dim < keys.shape[-1]:
            target[..., rule.rotary_dim :].copy_(source[..., rule.rotary_dim :])


def _pairs(keys: torch.Tensor, rule: LayerRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second dimension of each rotated pair, (..., rotary_dim / 2) each."""
    width = rule.rotary_dim
    if rule.style == "interleaved":
        return keys[..., 0:width:2], keys[..., 1:width:2]
    return keys[..., : width // 2], keys[..., width // 2 : width]


def match_rule(
    at_zero: torch.Tensor,
    further_on: Mapping[int, torch.Tensor],
    candidates: Iterable[tuple[float, ...]],
    tolerance: float,
) -> LayerRule | None:
    """The rule that moves a layer's keys from one place to others, or None if no rule does.

    Args:
        at_zero: (num_kv_heads, seq_len, head_dim) keys of some tokens, computed at one place.
        further_on: keys of the same tokens, computed so many positions further on.
        candidates: frequencies (`LayerRule.inv_freq`) to try.
        tolerance: largest error of a pair of dimensions, as a share of the pair's size.
    """
    before = at_zero.float()[None]
    rules = [LayerRule("none")]
    for inv_freq in candidates:
        rules += [LayerRule("half", inv_freq), LayerRule("interleaved", inv_freq)]
    errors = []
    for rule in rules:
        if rule.rotary_dim > before.shape[-1]:
            continue
        moved = torch.empty_like(before)
        worst = 0.0
        for delta, after in further_on.items():
            _rotate(before, rule, delta, moved)
            worst = max(worst, _mismatch(moved, after.float()[None], rule))
        errors.append((worst, rule))
    error, best = min(errors, key=lambda pair: pair[0])
    return best if error <= tolerance else None


def _mismatch(moved: torch.Tensor, after: torch.Tensor, rule: LayerRule) -> float:
    """The largest error of a pair of dimensions, as a share of the pair's size over all tokens.

    Each pair is compared with itself: in real keys some are a hundred times as large as others.
    """
    parts = []
    for square in ((moved - after).square(), after.square()):
        first, second = _pairs(square, rule)
        both = torch.cat([first + second, square[..., rule.rotary_dim :]], dim=-1)
        parts.append(both.mean(dim=2).sqrt())
    error, size = parts
    least = _LEAST_PAIR * size.mean(dim=-1, keepdim=True)
    return float((error / size.maximum(least).clamp(min=1e-30)).max())
