"""Short convolutions (LFM2) over the rows of a pass: each row sees the inputs before its own.

Such a layer keeps a token's input, as wide as the model, where an attention layer keeps keys and
values; it does not depend on position. So it is one more thing to store, place and repair. A
row's convolution needs the inputs of the few tokens before it, which may have been computed in
this pass or earlier. Knows modules of transformers; knows no prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch

# transformers' name for such layers.
KIND = "conv"


class Preceding(Protocol):
    """A cache that keeps inputs of convolutions, one a slot."""

    def preceding(self, layer: int, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """Keep a pass's inputs, and give each row's with those of the tokens before it.

        Args:
            inputs: (batch, num_rows, width).
            count: how many tokens before a row.

        Returns:
            (batch, num_rows, count + 1, width); 0 where there is no token.
        """


def convolve_rows(layers: Iterable[torch.nn.Module]) -> None:
    """Have the short convolutions of these layers ask our caches for the inputs before a row's own.

    With other caches they do as before. A second call changes nothing.
    """
    for layer in layers:
        module: Any = layer.conv
        plain = type(module).forward
        module.forward = partial(_forward, module, partial(plain, module))


def _forward(module: Any, plain: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    cache: Any = options.get("cache", options.get("past_key_values"))
    if not hasattr(cache, "preceding"):
        found: torch.Tensor = plain(hidden_states, **options)
        return found
    gate, scale, values = module.in_proj(hidden_states).chunk(3, dim=-1)
    seen = cache.preceding(module.layer_idx, gate * values, module.conv_kernel_size - 1)
    convolved = torch.einsum("brkw,wk->brw", seen, module.conv.weight.squeeze(1))
    if module.conv.bias is not None:
        convolved = convolved + module.conv.bias
    done: torch.Tensor = module.out_proj(scale * convolved)
    return done


def windows_before(kept: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """(batch, num_rows, count + 1, width) inputs of rows and of the tokens before them.

    Args:
        kept: (batch, 1, capacity, width), one a slot.
        slots: (num_rows,) int64, the rows'.
    """
    at = slots[:, None] + torch.arange(-count, 1, device=slots.device)
    found = kept[:, 0, at.clamp(min=0)]
    return found.masked_fill_((at < 0)[None, :, :, None], 0.0)
