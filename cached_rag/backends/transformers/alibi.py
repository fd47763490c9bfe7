"""ALiBi biases for prompts whose positions have gaps. Knows tensors; knows no model.

MPT, BLOOM and Falcon add a bias to the scores that is linear in the key's index. Where positions
have gaps, a key's index is not its position: the bias is then computed from the position, with the
same slope (Prompt Cache, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch

_BIASES = ("alibi", "position_bias")


def with_gaps(inputs: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    """A layer's inputs, its ALiBi biases (if any) computed from positions instead of indices.

    Args:
        positions: (num_keys,) int64, ascending, the position of each key.
    """
    biases = [name for name in _BIASES if inputs.get(name) is not None]
    mask = inputs.get("attention_mask")
    if biases and mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        biases.append("attention_mask")  # Falcon adds its bias to the mask, head by head
    return inputs | {name: stretched(inputs[name], positions) for name in biases}


def stretched(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn a (..., rows, keys) bias that is linear in the key's index into one linear in position.

    The bias's last row must see all keys. If the bias has more keys than there are positions, only
    its last keys are used.
    """
    count = len(positions)
    bias = bias[..., -count:]
    if count < 2:
        return bias
    slope = bias[..., -1:, 1:2] - bias[..., -1:, :1]
    shift = (positions - torch.arange(count)).to(bias.device, bias.dtype)
    return bias + slope * shift
