"""ALiBi biases over positions that jump. Knows tensors; knows no model.

MPT, BLOOM and Falcon build a bias linear in the key's index and hand it to their layers. Where
tokens stand further apart than their slots, the same slopes are laid over the positions instead
(Prompt Cache, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch

_BIASES = ("alibi", "position_bias")


def with_gaps(inputs: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    """A layer's inputs with its biases, if it has any, by position.

    Args:
        positions: (num_keys,) int64, ascending.
    """
    biases = [name for name in _BIASES if inputs.get(name) is not None]
    mask = inputs.get("attention_mask")
    if biases and mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        biases.append("attention_mask")  # Falcon adds its bias to the mask, head by head
    return inputs | {name: stretched(inputs[name], positions) for name in biases}


def stretched(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A (..., rows, keys) bias linear in the key's index, as linear in its position.

    Its last row must see all keys; of a bias over more keys than there are, the last ones count.
    """
    count = len(positions)
    bias = bias[..., -count:]
    if count < 2:
        return bias
    slope = bias[..., -1:, 1:2] - bias[..., -1:, :1]
    shift = (positions - torch.arange(count)).to(bias.device, bias.dtype)
    return bias + slope * shift
